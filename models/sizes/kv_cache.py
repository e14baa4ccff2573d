"""Know how mlx-lm's KV caches grow, and their quantised sizes. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STEP = 256
"""Number of tokens by which mlx-lm's caches grow (``mlx_lm.models.cache.KVCache.step``)."""


def held(tokens: int) -> int:
    """Return for how many tokens a cache of ``tokens`` has room."""
    return -(-tokens // STEP) * STEP


def parts_of(cache: Any) -> Sequence[Any]:
    """Return the caches that a layer's cache consists of: some layers attend, and keep a state."""
    parts: Sequence[Any] = getattr(cache, "caches", (cache,))
    return parts


@dataclass(frozen=True, slots=True)
class CacheQuantisation:
    """The quantisation of KV caches: ``bits`` for each element, with a scale and a bias for each
    ``group_size``, from the first step at which a sequence has ``start`` tokens, and any."""

    bits: int
    group_size: int
    start: int

    @property
    def border(self) -> int:
        """Tokens of a sequence that see plain keys and values; all others see quantised ones.
        Chunks of prompts end there too, so that a text does not depend on them."""
        return max(self.start, 1)

    def nbytes(self, elements: float, dtype_bytes: int) -> float:
        """Return the bytes of so many elements, whose scales have ``dtype_bytes`` each."""
        return elements * (self.bits / 8 + 2 * dtype_bytes / self.group_size)
