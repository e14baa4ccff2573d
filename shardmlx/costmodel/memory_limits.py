"""Derive MLX's memory limits of each rank from the plan and the machine. No MLX, no MPI.

What MLX does with them (0.32, ``allocator.cpp`` of each backend, ``resident.cpp``,
``transforms.cpp``); each array is *active* until it is freed, then its buffer is *cached*:

- memory limit: while active arrays take more, evaluation waits for what is running before it
  starts anything new; on Metal cached buffers are given back when both together would take more.
  An allocation beyond it succeeds all the same: what keeps a run below it is its plan.
- cache limit: bytes of buffers kept for reuse, which only arrays of about the same size can have.
- wired limit: bytes of buffers, cached ones too, that macOS 15 keeps in memory whatever else goes
  on; those that come after it is reached may be swapped out. Nothing is wired on a CPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmlx.common.formatting import gibibytes
from shardmlx.common.units import GIB, MIB, parse_bytes
from shardmlx.costmodel.cluster import Cluster
from shardmlx.errors import UserError

LEAST_CACHE = 32 << 20
"""Bytes that MLX caches on a CPU by default. They are enough there: glibc keeps freed memory too,
and can divide it. A cache of all that a step frees made steps no faster (measured)."""

CACHE_MARGIN = 1.25
"""Factor on what a step frees. Measured with SmolLM2: 1.01 times; the plan is within a fifth."""


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Bytes that the plan expects of a rank: at its peak, and of these what is always there."""

    peak: int
    resident: int

    def __post_init__(self) -> None:
        if not 0 <= self.resident <= self.peak:
            raise ValueError(f"{self.resident} bytes always there, of {self.peak} at most")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that a rank may use, and the ``reason``; ``inf`` where the machine is not known.

    ``most`` is its whole share of the machine, ``wirable`` the part that macOS lets the GPU wire,
    None where nothing is wired.
    """

    host: str
    nbytes: float
    reason: str
    most: float
    wirable: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Limits of a rank, in bytes, each with a reason; ``wired`` is None if nothing is wired."""

    planned: PlannedMemory
    memory: int
    cache: int
    wired: int | None
    reasons: tuple[str, str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the limits for the metrics."""
        return {
            "planned_peak_bytes": self.planned.peak,
            "memory_limit_bytes": self.memory,
            "cache_limit_bytes": self.cache,
            "wired_limit_bytes": self.wired,
            "reasons": dict(zip(("memory", "cache", "wired"), self.reasons, strict=True)),
        }


def budgets_of(
    cluster: Cluster,
    limit: int | None = None,
    working_sets: Sequence[int | None] = (),
) -> tuple[MemoryBudget, ...]:
    """Return what each world rank may use.

    That is ``limit``, if one is given, but no more than its share of the machine; else the part of
    that share on which plans count, or more where macOS wires more.

    ``working_sets`` are Metal's recommended ones, of whole machines; None where there is none.
    """
    ranks = Counter(machine.host for machine in cluster.machines)
    budgets = []
    for rank, machine in enumerate(cluster.machines):
        count = ranks[machine.host]
        most = math.inf if machine.memory is None else float(machine.memory)
        working_set = working_sets[rank] if working_sets else None
        wirable = None if working_set is None else working_set // count
        usable = 0.0 if wirable is None else min(wirable, most)
        shared = f", shared by {count} ranks" if count > 1 else ""
        if limit is not None:
            nbytes, reason = float(limit), "--memory-limit"
            if limit > most:
                nbytes, reason = most, f"all that there is{shared}; --memory-limit is more"
        elif usable > cluster.capacity(rank):
            nbytes, reason = usable, f"what macOS wires for the GPU{shared}"
        else:
            nbytes = cluster.capacity(rank)
            reason = f"{100 * cluster.memory_fraction:.0f}% of the machine's memory{shared}"
        budgets.append(MemoryBudget(machine.host, nbytes, reason, most, wirable))
    return tuple(budgets)


def within(cluster: Cluster, budgets: Sequence[MemoryBudget]) -> Cluster:
    """Return the same machines with no more memory than these, all of which may be used."""
    machines = (
        replace(machine, memory=None if math.isinf(budget.nbytes) else max(1, int(budget.nbytes)))
        for machine, budget in zip(cluster.machines, budgets, strict=True)
    )
    return replace(cluster, machines=tuple(machines), memory_fraction=1.0)


def limited(cluster: Cluster, limit: int | None) -> Cluster:
    """Return the machines of a plan, with no more memory than the user's ``limit`` for a rank."""
    return cluster if limit is None else within(cluster, budgets_of(cluster, limit))


def check_budgets(
    budgets: Sequence[MemoryBudget], planned: Sequence[PlannedMemory], remedy: str
) -> None:
    """Raise ``UserError`` for the first rank whose plan does not fit, with ``remedy``."""
    for rank, (budget, plan) in enumerate(zip(budgets, planned, strict=True)):
        if plan.peak > budget.nbytes:
            raise UserError(
                f"rank {rank} ({budget.host}) would hold {gibibytes(plan.peak)} of its "
                f"{gibibytes(budget.nbytes)} ({budget.reason})",
                f"{how_to_allow(budget, plan.peak)}{remedy}",
            )


def how_to_allow(budget: MemoryBudget, nbytes: int) -> str:
    """Return the remedy that names a limit which is enough, if the machine has that."""
    if parse_bytes(limit_for(nbytes)) > budget.most:
        return ""
    return f"give --memory-limit {limit_for(nbytes)} or more, "


def how_to_allow_more(limit: int | None, budgets: Sequence[MemoryBudget]) -> str:
    """Return the remedy to raise the limit, where it is not known how much would be enough."""
    can_be_raised = limit is not None and any(budget.nbytes < budget.most for budget in budgets)
    return "raise --memory-limit, " * can_be_raised


def limit_for(nbytes: int) -> str:
    """Return a ``--memory-limit`` that is enough for ``nbytes``, rounded up to be typed."""
    if nbytes <= GIB - MIB:
        return f"{math.ceil(nbytes / MIB)}MiB"
    return f"{math.ceil(10 * nbytes / GIB) / 10:g}GiB"


def memory_limits(budget: MemoryBudget, planned: PlannedMemory, backend: str) -> MemoryLimits:
    """Return the limits of a rank whose plan fits: see ``check_budgets``.

    On a CPU nothing gives way, so that cache and plan together stay within the budget. On Metal MLX
    sees to that, and the cache has room for what a step frees, so that none of it is allocated
    anew. A larger one would fill with buffers of lengths that do not come again.
    """
    memory = int(budget.nbytes)
    of_a_step = planned.peak - planned.resident
    if backend == "cpu":
        cache = max(0, min(LEAST_CACHE, memory - planned.peak))
        why_cache = "MLX's own on a CPU" if cache == LEAST_CACHE else "what the plan leaves"
        wired, why_wired = None, "nothing is wired on a CPU"
    else:
        cache = max(LEAST_CACHE, round(CACHE_MARGIN * of_a_step))
        why_cache = "what a step frees, and a margin"
        if cache > memory - planned.resident:
            cache, why_cache = max(0, memory - planned.resident), "what the weights leave"
        wired, why_wired = _wired(budget, min(memory, planned.peak + cache))
    return MemoryLimits(planned, memory, cache, wired, (budget.reason, why_cache, why_wired))


def _wired(budget: MemoryBudget, wanted: int) -> tuple[int | None, str]:
    if budget.wirable is None:
        return None, "macOS does not say how much may be wired"
    if wanted > budget.wirable:
        return budget.wirable, "this rank's share of what macOS wires for the GPU"
    return wanted, "plan and cache"


def unwired(budgets: Sequence[MemoryBudget], planned: Sequence[PlannedMemory]) -> tuple[str, ...]:
    """Return a warning for each rank whose plan is more than macOS keeps in memory for the GPU."""
    return tuple(
        f"rank {rank} ({budget.host}) plans {gibibytes(plan.peak)}, of which macOS keeps "
        f"{gibibytes(budget.wirable)} in memory: it may swap the rest out, which is slow; "
        "python -m shardmlx.doctor prints the command that raises iogpu.wired_limit_mb"
        for rank, (budget, plan) in enumerate(zip(budgets, planned, strict=True))
        if budget.wirable is not None and plan.peak > budget.wirable
    )


def exceeded(
    limits: Sequence[MemoryLimits], hosts: Sequence[str], peaks: Sequence[int]
) -> tuple[str, ...]:
    """Return a warning for each rank that took more than its limit, which MLX does not enforce."""
    return tuple(
        f"rank {rank} ({host}) held {gibibytes(peak)} at its peak, more than its limit of "
        f"{gibibytes(each.memory)} ({each.reasons[0]}), and {gibibytes(each.planned.peak)} were "
        "planned"
        for rank, (each, host, peak) in enumerate(zip(limits, hosts, peaks, strict=True))
        if peak > each.memory
    )
