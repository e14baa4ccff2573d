"""Sets of data as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(directory: Path, **sets: Sequence[Any]) -> str:
    """Write sets of rows; a text is written as it is."""
    directory.mkdir(exist_ok=True)
    for name, rows in sets.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        text = "".join(line + "\n" for line in lines)
        (directory / f"{name}.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    return str(directory)
