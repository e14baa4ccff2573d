"""Limit MLX's allocator: the bytes that it may hold, and those that the machine lets it wire."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from shardmlx.common.process_memory import memory_bounds, resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.memory_limits import (
    MemoryBudget,
    MemoryLimits,
    PlannedMemory,
    ProcessMemory,
    budgets_of,
    memory_limits,
    unwired,
)
from shardmlx.distributed.transport import Transport

GROWTH = 8 << 20
"""Bytes that a process takes outside MLX after its setup: buffers of MPI and BLAS, late imports.
Measured."""


def find_budgets(
    transport: Transport, cluster: Cluster, limit: int | None, later: int = 0
) -> tuple[MemoryBudget, ...]:
    """Return the memory budget of each rank, within the user's ``limit``; the same on all ranks.
    ``later`` are this rank's bytes for requests, outside MLX.

    All ranks must call it, when they have everything but their weights.
    """
    mine = working_set(), process_memory(later)
    sets, processes = zip(*transport.all_gather(mine, "comparing memory"), strict=True)
    return budgets_of(cluster, limit, sets, processes)


def process_memory(later: int = 0) -> ProcessMemory:
    """Return this process's limits, and its bytes beside MLX's arrays, with ``later`` ones."""
    outside = resident_bytes() - mx.get_active_memory() - mx.get_cache_memory()
    return ProcessMemory(max(0, outside) + GROWTH + later, memory_bounds())


def working_set() -> int | None:
    """Return the bytes that macOS lets the GPU wire, of all processes; None if nothing is wired."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def limit_memory(
    rank: int,
    budgets: Sequence[MemoryBudget],
    planned: Sequence[PlannedMemory],
    backend: str,
    reporter: Reporter,
) -> tuple[MemoryLimits, ...]:
    """Limit this process to the plan of its ``rank``; return the limits of all ranks.

    Must be called before weights are loaded, so that they are wired first. Warns if macOS would not
    keep the whole plan in memory.
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
