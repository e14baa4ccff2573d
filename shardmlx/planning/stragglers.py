"""Find ranks that are slower than expected, beside the others. No MLX, no MPI.

With measured times (``--profile``), a rank should take the predicted time. Other predictions are
FLOPs or from data sheets: good enough to divide layers, but off by a factor that differs from rank
to rank, since the head costs more than its FLOPs and machines reach different shares of their
peaks. The first reports of the run then set the usual time of a rank: a rank that becomes slow is
found, and not one that is slow from its first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.timing import Seconds
from shardmlx.costmodel.workload import Workload
from shardmlx.pipeline.plan import Plan

TOLERANCE = 1.25
"""Factor by which a rank may exceed its expected time, relative to the others."""

REPORTS_IN_A_ROW = 3
"""Slow reports in a row that make a straggler; fewer are a hiccup: a page fault, a backup."""

REPORTS_TO_KNOW = 3
"""Number of reports that set the usual time if nothing was measured; the first may warm up."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank's seconds of computing a step, and those that would keep up with the others."""

    step: int
    rank: int
    host: str
    compute_seconds: float
    expected_seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} computes {self.compute_seconds:.3g} s a step where "
            f"{self.expected_seconds:.3g} s would keep up with the others: something slows it down"
        )


@dataclass(slots=True)
class Watch:
    """Compares the world ranks of a run at each report and names a straggler once.
    ``is_measured``: a profile predicts."""

    hosts: Sequence[str]
    is_measured: bool = False
    _first: list[list[float]] = field(default_factory=list)
    _slow_reports: list[int] = field(default_factory=list)
    _named: set[int] = field(default_factory=set)

    def observe(
        self, step: int, measured: Sequence[float], predicted: Sequence[float]
    ) -> list[Straggler]:
        """Return the new stragglers, by the compute of a step on each world rank: ``measured`` in
        seconds, ``predicted`` in any unit. A report without some rank is ignored."""
        ratios = [
            seconds / cost if cost > 0 else math.nan
            for seconds, cost in zip(measured, predicted, strict=True)
        ]
        if len(ratios) < 2 or not all(math.isfinite(each) and each > 0 for each in ratios):
            return []
        if not self.is_measured and len(self._first) < REPORTS_TO_KNOW:
            self._first.append(ratios)
            return []
        usual = [1.0] * len(ratios)
        if not self.is_measured:
            usual = [median(of_rank) for of_rank in zip(*self._first, strict=True)]
        slowdowns = [ratio / each for ratio, each in zip(ratios, usual, strict=True)]
        self._slow_reports = self._slow_reports or [0] * len(ratios)
        found = []
        for rank, slowdown in enumerate(slowdowns):
            others = median(slowdowns[:rank] + slowdowns[rank + 1 :])
            is_slow = min(slowdown, slowdown / others) > TOLERANCE
            self._slow_reports[rank] = self._slow_reports[rank] + 1 if is_slow else 0
            if self._slow_reports[rank] < REPORTS_IN_A_ROW or rank in self._named:
                continue
            self._named.add(rank)
            seconds = measured[rank]
            found.append(
                Straggler(step, rank, self.hosts[rank], seconds, seconds / slowdown * others)
            )
        return found


def compute_of_ranks(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> list[float]:
    """Return each world rank's compute of a step, with its share of the update, in the unit."""
    stage_map = plan.stage_map
    computed = []
    for rank in range(plan.mesh.size):
        model = cluster.clock(rank, workload).seconds(workload, plan.micro_batch_size, length)
        replica, pipeline_rank = plan.mesh.coordinates(rank)
        ranges = [stage_map.partition.ranges[s] for s in stage_map.stages_of(pipeline_rank)]
        total = sum((model.stage(*ends) for ends in ranges), Seconds())
        # The last micro-batch may have fewer rows, but packed ones are alike.
        count = plan.shares[replica] / plan.micro_batch_size
        if plan.pack:
            count = plan.microbatches_of(replica)
        update = total.update / workload.batch.grad_accumulation_steps
        computed.append(plan.runs * count * total.microbatch + update)
    return computed
