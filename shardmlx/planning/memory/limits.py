"""Derive the memory that each rank may have, and MLX's limits, from plan and machine.

No MLX, no MPI. A rank's process takes more than MLX's arrays: the interpreter, libraries, tokenizer
and data, MPI. The overhead is measured before weights are loaded; the rest of the process's limit
is for arrays.

Limits of MLX (0.32, ``allocator.cpp`` of each backend, ``resident.cpp``, ``transforms.cpp``); An
array is *active* until it is freed, then its buffer is *cached*:

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
from shardmlx.common.units import GIB, MIB
from shardmlx.planning.facts.cluster import Cluster

LEAST_CACHE = 32 << 20
"""Bytes that MLX caches on a CPU by default. A larger cache made no step faster (measured): glibc
keeps freed memory too."""

BOUND_FRACTION = 0.97
"""Share of a memory cgroup for plans: the rest is for mpirun and page tables. A
process beyond the limit is killed."""

GPU_FRACTION = 0.95
"""Share of the memory of a GPU that has its own, for MLX's arrays: MLX's own default. The rest is
for the contexts of CUDA."""

FRAGMENTED = 0.06
"""Share of a step's freed bytes kept in fragments by the C library: 0.03 to 0.08 on Linux."""

CACHE_MARGIN = 1.25
"""Cache size as a multiple of a step's freed bytes. SmolLM2 took 1.01; plans are within 5%."""


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Planned bytes of a rank: at its peak, and the part that is always there."""

    peak: int
    resident: int

    def __add__(self, other: PlannedMemory) -> PlannedMemory:
        """Return the bytes of two parts that a rank holds side by side."""
        return PlannedMemory(self.peak + other.peak, self.resident + other.resident)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The process of a rank: bytes ``outside`` MLX, the limit of its memory cgroup, what macOS
    wires for the GPU, and the memory of a GPU that has its own. The ranks of a host share the
    last three."""

    outside: int = 0
    limit: int | None = None
    working_set: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of MLX's arrays that a rank may have; ``inf`` if the machine is unknown, negative if
    the ``outside`` bytes of its process have no room. ``reason`` names the limit on both, ``most``
    caps the user's; ``wirable`` is what macOS lets the GPU wire, None if nothing is wired."""

    host: str
    nbytes: float
    reason: str
    most: float
    wirable: int | None = None
    outside: int = 0

    @property
    def process(self) -> float:
        """Bytes that the whole process may take."""
        return self.nbytes + self.outside


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Limits of MLX on a rank whose plan fits its budget, in bytes."""

    budget: MemoryBudget
    planned: PlannedMemory
    backend: str

    @property
    def memory(self) -> int:
        """Bytes of MLX's arrays."""
        return int(self.budget.nbytes)

    @property
    def cache(self) -> int:
        """Bytes kept once freed: those of one step, so that no step allocates anew."""
        planned = self.planned
        if self.backend == "cpu":
            # There the cache never gives way to arrays.
            return max(0, min(LEAST_CACHE, self.memory - planned.peak))
        of_a_step = max(LEAST_CACHE, round(CACHE_MARGIN * (planned.peak - planned.resident)))
        return max(0, min(of_a_step, self.memory - planned.resident))

    @property
    def wired(self) -> int | None:
        """Bytes of plan and cache that macOS keeps in memory; None if nothing is wired."""
        if self.backend == "cpu" or self.budget.wirable is None:
            return None
        return min(self.memory, self.planned.peak + self.cache, self.budget.wirable)

    @property
    def planned_process(self) -> int:
        """Bytes that the whole process takes at the planned peak."""
        return self.process_peak(self.planned.peak)

    def process_peak(self, peak: int) -> int:
        """Return the bytes that the whole process takes when the arrays are at their ``peak``."""
        passing = max(0, peak - self.planned.resident)
        # On a CPU, MLX's cache and the C library's fragments are lost to other arrays.
        kept = min(self.cache, passing) + FRAGMENTED * passing if self.wired is None else 0
        return round(peak + self.budget.outside + kept)

    def as_json(self) -> dict[str, Any]:
        """Return the limits and what was planned, in bytes, as metrics have them."""
        return {
            "planned_peak_bytes": self.planned.peak,
            "planned_process_bytes": self.planned_process,
            "memory_limit_bytes": self.memory,
            "process_limit_bytes": int(self.budget.process),
            "cache_limit_bytes": self.cache,
            "wired_limit_bytes": self.wired,
            "reasons": {"memory": self.budget.reason},
        }


def budgets_of(
    cluster: Cluster, limit: int | None = None, processes: Sequence[ProcessMemory] = ()
) -> tuple[MemoryBudget, ...]:
    """Return the memory budget of each world rank: the least of ``limit`` (else the usable share of
    its machine, or Metal's working set for the arrays), of its memory cgroup and of the memory of
    a GPU that has its own, for the arrays."""
    processes = processes or (ProcessMemory(),) * cluster.size
    ranks = Counter(machine.host for machine in cluster.machines)
    budgets = []
    for rank, (machine, process) in enumerate(zip(cluster.machines, processes, strict=True)):
        count = ranks[machine.host]
        outside = process.outside
        wirable = None if process.working_set is None else process.working_set // count
        memory = math.inf if machine.memory is None else float(machine.memory)
        bounds = []
        if process.limit is not None:
            bounds = [
                (process.limit * BOUND_FRACTION / count, f"the memory cgroup{_shared(count)}")
            ]
        if process.gpu is not None:
            arrays = process.gpu * GPU_FRACTION / count
            bounds.append((arrays + outside, f"the GPU's own memory{_shared(count)}"))
        most, why = min([(memory, f"all that there is{_shared(count)}"), *bounds])
        if limit is not None:
            total = float(limit)
            reason = "--memory-limit"
            if limit > most:
                total = most
                reason = f"{why}; --memory-limit is more"
        elif wirable is None:
            part = f"{100 * cluster.memory_fraction:.0f}% of the machine's memory"
            if machine.wired is not None:
                part = "what macOS wires for the GPU, by the hostfile"
            total, reason = min([(cluster.capacity(rank), part + _shared(count)), *bounds])
        else:
            metal = f"what macOS wires for the GPU{_shared(count)}"
            total, reason = min([(float(wirable + outside), metal), (most, why)])
        budgets.append(MemoryBudget(machine.host, total - outside, reason, most, wirable, outside))
    return tuple(budgets)


def _shared(count: int) -> str:
    return f", shared by {count} ranks" if count > 1 else ""


def within(cluster: Cluster, budgets: Sequence[MemoryBudget]) -> Cluster:
    """Return the same machines with no more memory than ``budgets``, all of it usable."""
    machines = (
        replace(
            machine,
            memory=None if math.isinf(budget.nbytes) else max(1, int(budget.nbytes)),
            wired=None,
        )
        for machine, budget in zip(cluster.machines, budgets, strict=True)
    )
    return replace(cluster, machines=tuple(machines), memory_fraction=1.0)


def limits_of(
    budgets: Sequence[MemoryBudget], planned: Sequence[PlannedMemory], backend: str
) -> tuple[MemoryLimits, ...]:
    """Return the limits of all ranks; none where their budgets are not known."""
    pairs = zip(budgets, planned, strict=True) if budgets else ()
    return tuple(MemoryLimits(budget, each, backend) for budget, each in pairs)


def would_take(rank: int, budget: MemoryBudget, nbytes: int) -> str:
    """Say how much the process of a rank with ``nbytes`` of arrays takes, and of how much."""
    beside = f", {gibibytes(budget.outside)} of it outside MLX," if budget.outside else ""
    return (
        f"rank {rank} ({budget.host}) would take {gibibytes(nbytes + budget.outside)}{beside} of "
        f"its {gibibytes(budget.process)} ({budget.reason})"
    )


def how_to_allow(budgets: Sequence[MemoryBudget], planned: Sequence[PlannedMemory]) -> str:
    """Return the remedy that names a sufficient limit, if all machines have that much."""
    needed = [plan.peak + budget.outside for budget, plan in zip(budgets, planned, strict=True)]
    if any(each > budget.most for each, budget in zip(needed, budgets, strict=True)):
        return ""
    return f"give --memory-limit {limit_for(max(needed))} or more, "


def limit_for(nbytes: int) -> str:
    """Return a ``--memory-limit`` that is enough for ``nbytes``, rounded up to be typed."""
    if nbytes <= GIB - MIB:
        return f"{math.ceil(nbytes / MIB)}MiB"
    return f"{math.ceil(10 * nbytes / GIB) / 10:g}GiB"


def unwired(budgets: Sequence[MemoryBudget], planned: Sequence[PlannedMemory]) -> tuple[str, ...]:
    """Return a warning for each rank whose plan exceeds the memory that macOS wires for the GPU."""
    return tuple(
        f"rank {rank} ({budget.host}) plans {gibibytes(plan.peak)}, of which macOS keeps "
        f"{gibibytes(budget.wirable)} in memory: it may swap the rest out, which is slow; "
        "shardmlx doctor prints the command that raises iogpu.wired_limit_mb"
        for rank, (budget, plan) in enumerate(zip(budgets, planned, strict=True))
        if budget.wirable is not None and plan.peak > budget.wirable
    )


def exceeded(
    limits: Sequence[MemoryLimits], hosts: Sequence[str], peaks: Sequence[int]
) -> tuple[str, ...]:
    """Return a warning for each rank that took more than its limit, which MLX does not enforce."""
    return tuple(
        f"rank {rank} ({host}) held {gibibytes(peak)} in MLX's arrays at its peak, more than its "
        f"limit of {gibibytes(each.memory)} ({each.budget.reason}), and "
        f"{gibibytes(each.planned.peak)} were planned"
        for rank, (each, host, peak) in enumerate(zip(limits, hosts, peaks, strict=True))
        if peak > each.memory
    )
