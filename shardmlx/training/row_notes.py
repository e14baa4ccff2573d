"""Notes of the rows of a set, which are said once, with the number of rows. No MLX, no MPI."""

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
class RowNotes:
    """Counts what rows of a set have in common, and which of their columns are read."""

    name: str
    _count: int = 0
    _rows: dict[str, list[str]] = field(default_factory=dict)
    _columns: dict[str, None] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def take(self, row: Mapping[str, Any]) -> None:
        """Take down a row of the set: its columns that hold anything."""
        self._count += 1
        self._columns |= {key: None for key, value in row.items() if value not in NOTHING}

    def add(self, what: str, row: str) -> None:
        """Take down of a row, by its name, what is so: "3 of 5 rows end in an empty answer"."""
        named = self._rows.setdefault(what, [])
        if not named or named[-1] != row:
            named.append(row)

    def reads(self, *keys: str) -> None:
        """Take down that the rows' columns of these keys are read."""
        self._read.update(keys)

    def warnings(self) -> list[str]:
        """Return a line for each thing that was taken down, and one for columns not read."""
        lines = [
            f"{self.name}: {len(named)} of {self._count} rows {what} (the first is {named[0]})"
            for what, named in self._rows.items()
        ]
        unread = [key for key in self._columns if key not in self._read]
        if unread:
            lines.append(
                f"{self.name}: its columns {', '.join(map(repr, unread))} are not read, but "
                f"{', '.join(map(repr, sorted(self._read)))}"
            )
        return lines


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
