"""Know how mlx-lm's KV caches grow. No MLX, no MPI."""

from __future__ import annotations

STEP = 256
"""Number of tokens by which mlx-lm's caches grow (``mlx_lm.models.cache.KVCache.step``)."""


def held(tokens: int) -> int:
    """Return for how many tokens a cache of ``tokens`` has room."""
    return -(-tokens // STEP) * STEP
