"""Numbers and columns for people. No MLX, no MPI."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from shardmlx.common.units import GIB, KIB, MIB

_NUMBERS = frozenset("0123456789.")

_WIDEST = 1_000_000
"""Characters of a line: tables are never cut or wrapped, which a terminal does better."""


def columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text of any width; columns of numbers to the right."""
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


def numbers_of(start: int, stop: int) -> str:
    """Return a half-open range as the numbers in it: ``4-9``, or ``4`` for one alone."""
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def plural(number: int, noun: str) -> str:
    """Return a number of things: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count(number: float) -> str:
    """Return a number of parameters as 1.23 B, M or k."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:g}"


def figure(number: float, digits: int = 3) -> str:
    """Return a number as people write it, to so many digits: ``258``, ``15.5``, ``1,490``."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    places = digits - 1 - math.floor(math.log10(abs(number)))
    return f"{round(number, places):,.{max(0, places)}f}"


def duration(seconds: float) -> str:
    """Return seconds as people write them: ``20.1 ms``, ``15.5 s``, ``258 s``."""
    return (
        f"{figure(seconds)} s" if seconds >= 0.1 or seconds == 0 else f"{figure(1e3 * seconds)} ms"
    )


def long_duration(seconds: float) -> str:
    """Return the time of a whole run in the unit that fits: ``90 s``, ``36 min``, ``36 h``."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{figure(seconds / size, 2)} {unit}"
    return f"{figure(seconds, 2)} s"


def gibibytes(nbytes: float) -> str:
    """Return bytes in GiB, as the memory of a Mac is sold; below 0.1 GiB in MiB, and so on."""
    if nbytes >= GIB / 10:
        return f"{nbytes / GIB:.2f} GiB"
    if nbytes >= MIB / 10:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes / KIB:.1f} KiB" if nbytes >= KIB else f"{nbytes:g} B"


def percent(measured: float, predicted: float) -> str:
    """Return the deviation of a measurement from a prediction: ``+3%``."""
    return f"{100 * (measured / predicted - 1):+.0f}%"


def without_controls(text: str) -> str:
    """Return a text that steers no terminal: most control characters become escapes."""
    return "".join(
        each.encode("unicode_escape").decode()
        if unicodedata.category(each) == "Cc" and each not in "\t\n"
        else each
        for each in text
    )
