"""Weights that two programs can make alike: of whole numbers that the name of a tensor begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

import numpy as np

TOKENS = [1, 5, 3, 11, 7, 2, 9, 14, 6, 4, 13, 8, 10, 12, 15, 1, 3, 2, 7, 5, 11, 6, 9, 4]
"""A text for a model of 16 tokens."""
SHOWN = (3, 12, 23)
"""Positions of it whose logits are kept."""


def seeded_weight(name: str, sides: Sequence[int]) -> np.ndarray:
    """Return the weight of this name in float32: a vector about 1, a matrix about 0."""
    size = math.prod(sides)
    numbers = np.arange(size, dtype=np.uint64) + (np.uint64(crc32(name.encode())) << np.uint64(20))
    # The finaliser of splitmix64: neighbours become independent, to the bit on any machine.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    drawn = (numbers >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    scaled = 1 + 0.2 * drawn if len(sides) == 1 else 2 * math.sqrt(3 / sides[-1]) * drawn
    return np.asarray(scaled.reshape(sides), np.float32)
