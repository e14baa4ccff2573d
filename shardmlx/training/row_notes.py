"""Notes of the rows of a set, each of which is said once. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that hold nothing."""

_LONGEST = 60
"""Characters of a value that a message shows."""


@dataclass(slots=True)
class _Note:
    """A fact of ``count`` rows, from the ``first`` to the ``last``; ``is_of_all`` says that all
    rows were asked."""

    first: str
    last: str
    is_of_all: bool
    count: int = 1


def how_many(count: int, total: int, *, is_of_all: bool) -> str:
    """Return how many of a ``total`` there are, in words: at least ``count``, unless all were
    asked."""
    return f"{'' if is_of_all else 'at least '}{count} of {total}"


@dataclass(slots=True)
class RowNotes:
    """Facts that rows of a set have in common, and which of their columns are read."""

    name: str
    _total: int = 0
    _notes: dict[str, _Note] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _columns: dict[str, None] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def take(self, row: Mapping[str, Any]) -> None:
        """Take down a row of the set: its columns that hold anything."""
        self._total += 1
        if not row.keys() <= self._columns.keys():
            self._columns |= {key: None for key, value in row.items() if value not in NOTHING}

    def add(self, what: str, row: str, *, is_of_all: bool) -> None:
        """Take down of a row, by its name, what is so: "3 of 5 rows end in an empty answer".
        ``is_of_all`` says that all rows are asked for that before anything is said."""
        note = self._notes.get(what)
        if note is None:
            self._notes[what] = _Note(row, row, is_of_all)
        elif note.last != row:
            note.last = row
            note.count += 1

    def reads(self, *keys: str) -> None:
        """Take down that the rows' columns of these keys are read."""
        self._read.update(keys)

    @property
    def columns_read(self) -> list[str]:
        """The columns that are read, in alphabetical order."""
        return sorted(self._read)

    def news(self, *, is_complete: bool) -> list[str]:
        """Return a line for each thing that was not said before, and one for columns not read.
        ``is_complete`` says that all rows were asked for everything."""
        lines = []
        for what, note in self._notes.items():
            if what not in self._said:
                self._said.add(what)
                is_of_all = is_complete or note.is_of_all
                count = how_many(note.count, self._total, is_of_all=is_of_all)
                such = "the first is" if is_of_all else "such as"
                lines.append(f"{self.name}: {count} rows {what} ({such} {note.first})")
        unread = [key for key in self._columns if key not in self._read]
        if unread:
            lines.append(
                f"{self.name}: its columns {', '.join(map(repr, unread))} are not read, but "
                f"{', '.join(map(repr, sorted(self._read)))}"
            )
            self._columns = {key: None for key in self._columns if key in self._read}
        return lines


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
