"""Numbers and columns for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

_NUMBERS = frozenset("0123456789.")

_WIDEST = 1_000_000
"""Characters of a line: no table is cut or wrapped, a terminal does that better."""


def columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text, as wide as it is; columns of numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    cells = zip(*lines, strict=True) if lines else ((),) * len(header)
    for name, column in zip(header, cells, strict=True):
        is_of_numbers = column and all(not cell or cell[0] in _NUMBERS for cell in column)
        table.add_column(name, no_wrap=True, justify="right" if is_of_numbers else "left")
    for line in lines:
        table.add_row(*line)
    console = Console(file=StringIO(), width=_WIDEST, color_system=None, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def count(number: float) -> str:
    """Parameters for people."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:g}"


def gigabytes(count: float) -> str:
    """Bytes for people, in the decimal units of mlx-lm."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def size(nbytes: float) -> str:
    """Bytes for people."""
    if nbytes >= 1e5:
        return gigabytes(nbytes)
    return f"{nbytes / 1e3:.1f} kB" if nbytes >= 1e3 else f"{nbytes:g} B"
