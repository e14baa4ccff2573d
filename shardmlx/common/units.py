"""Quantities with units, as users write them. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

KIB, MIB, GIB = 2**10, 2**20, 2**30

MEGABYTE = 10**6
"""Bytes of a step of progress bars."""

DECIMAL: Mapping[str, float] = MappingProxyType(
    {"": 1e0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
)

_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

BYTES: Mapping[str, float] = MappingProxyType(
    {f"{prefix}B": size for prefix, size in (*DECIMAL.items(), *_BINARY.items())}
)
"""Bytes of each unit of memory: GB is 10**9, as in mlx_lm, and GiB is 2**30."""


def split_quantity(text: str) -> tuple[float, str]:
    """Return number and unit of a quantity like ``64GiB``; ``ValueError`` without a number."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(.*)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} does not begin with a number")
    return float(match[1]), match[2]


def parse_bytes(text: str) -> int:
    """Return the bytes of ``12GiB``, ``500 mb``, ``2G`` or ``1000``; else ``ValueError``."""
    sizes = {unit.casefold().removesuffix("b"): size for unit, size in BYTES.items()}
    try:
        number, unit = split_quantity(text)
        return round(number * sizes[unit.casefold().removesuffix("b")])
    except (KeyError, ValueError, OverflowError):
        raise ValueError("give bytes, or a size like 500MiB or 2GB") from None
