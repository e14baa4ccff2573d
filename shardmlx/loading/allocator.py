"""MLX's allocator: what it may hold, and what the machine lets it wire. MLX."""

from __future__ import annotations

import mlx.core as mx

from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.memory_limits import MemoryBudget, MemoryLimits, budgets_of
from shardmlx.distributed.transport import Transport


def find_budgets(
    transport: Transport, cluster: Cluster, limit: int | None
) -> tuple[MemoryBudget, ...]:
    """What each rank may use, ``limit`` being the user's; the same on all ranks. Collective."""
    return budgets_of(cluster, limit, transport.all_gather(working_set(), "comparing memory"))


def working_set() -> int | None:
    """Bytes that macOS lets the GPU wire, all processes together; None where nothing is wired."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def set_limits(limits: MemoryLimits) -> None:
    """For this process, from now on: before weights are loaded, so that they are wired first."""
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
