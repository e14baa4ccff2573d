"""Numbers and columns for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_NUMBERS = frozenset("0123456789.")


def columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Text in columns; those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    to_the_right = [
        all(not cell or cell[0] in _NUMBERS for cell in column)
        for column in zip(*lines, strict=True)
    ] or [False] * len(header)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_the_right, strict=True)
        ).rstrip()
        for line in (header, *lines)
    )


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
