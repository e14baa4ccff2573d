"""Notes of the rows of a set, which are said once, with the number of rows. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
    _rows: dict[str, list[str]] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def add(self, what: str, row: str) -> None:
        """Take down of a row, by its name, what is so: "3 of 5 rows end in an empty answer"."""
        named = self._rows.setdefault(what, [])
        if not named or named[-1] != row:
            named.append(row)

    def reads(self, *keys: str) -> None:
        """Take down that the rows' columns of these keys are read."""
        self._read.update(keys)

    def warnings(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return a line for each thing that was taken down, and one for columns that are not read,
        of the ``rows`` of the set."""
        count = 0
        unread: dict[str, None] = {}
        for row in rows:
            count += 1
            unread |= {
                key: None
                for key, value in row.items()
                if key not in self._read and value not in NOTHING
            }
        lines = [
            f"{self.name}: {len(named)} of {count} rows {what} (the first is {named[0]})"
            for what, named in self._rows.items()
        ]
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
