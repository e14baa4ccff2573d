"""Limits of MLX's allocator: what it may hold, and what the machine lets it wire."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from shardmlx.common.reporter import Reporter
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.memory_limits import (
    MemoryBudget,
    MemoryLimits,
    PlannedMemory,
    budgets_of,
    memory_limits,
    unwired,
)
from shardmlx.distributed.transport import Transport


def find_budgets(
    transport: Transport, cluster: Cluster, limit: int | None
) -> tuple[MemoryBudget, ...]:
    """Return what each rank may use, ``limit`` being the user's; the same on all ranks.

    All ranks must call it.
    """
    return budgets_of(cluster, limit, transport.all_gather(working_set(), "comparing memory"))


def working_set() -> int | None:
    """Return the bytes that macOS lets the GPU wire, all processes together; None where nothing is
    wired."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def limit_memory(
    rank: int,
    budgets: Sequence[MemoryBudget],
    planned: Sequence[PlannedMemory],
    backend: str,
    reporter: Reporter,
) -> tuple[MemoryLimits, ...]:
    """Limit this process to what is planned of its ``rank``; return the limits of all ranks.

    To be called before weights are loaded, so that they are wired first. Warns where macOS would
    not keep the whole plan in memory.
    """
    for warning in unwired(budgets, planned):
        reporter.warn(warning)
    limits = tuple(
        memory_limits(budget, each, backend) for budget, each in zip(budgets, planned, strict=True)
    )
    set_limits(limits[rank])
    return limits


def set_limits(limits: MemoryLimits) -> None:
    """Set the limits of this process, from now on."""
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
