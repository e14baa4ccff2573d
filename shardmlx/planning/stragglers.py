"""Find ranks that are slower than expected, beside the others. No MLX, no MPI.

A rank that is slow from its first step takes longer for its work than the others: replicas of a
stage compute the same for each row, and stages about the same for each layer of like work. A rank
that becomes slow takes longer than in the first reports of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.layout import rows_by_speed
from shardmlx.planning.time.parts import Seconds

TOLERANCE = 1.25
"""Factor by which a rank may exceed its expected time, relative to the others."""

STAGE_TOLERANCE = 1.75
"""The same beside other stages, whose FLOPs are known and not their times: backward takes longer
than its FLOPs say (1.4 times, where another stage has none), and so do short stages."""

REPORTS_IN_A_ROW = 3
"""Slow reports in a row that make a straggler; fewer are a hiccup: a page fault, a backup."""

REPORTS_TO_KNOW = 3
"""Number of reports that set the usual time; the first may warm up."""

_MEASURE = "measure the machines with shardmlx profile, and give the file as --profile"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank's seconds of computing a step, those that would keep up with ``others``, and what to
    do about it."""

    step: int
    rank: int
    host: str
    compute_seconds: float
    expected_seconds: float
    others: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} computes {self.compute_seconds:.3g} s a step where "
            f"{self.expected_seconds:.3g} s would keep up with {self.others}: {self.remedy}"
        )


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step: of each world rank in any unit, FLOPs or predicted seconds, and the rows
    of each replica, of which each ``together`` stay so. ``is_measured``: a profile predicts."""

    mesh: Mesh
    of_ranks: tuple[float, ...]
    rows: tuple[int, ...]
    together: int = 1
    is_measured: bool = False

    @classmethod
    def of(cls, plan: Plan, workload: Workload, cluster: Cluster, length: int) -> Work | None:
        """Return the work of a plan for sequences of ``length`` tokens; None with tensor shares,
        which wait for each other in the middle of what they compute."""
        if plan.mesh.tp > 1:
            return None
        ranges = plan.stage_map.partition.ranges
        found = []
        for rank in range(plan.mesh.size):
            replica, pipeline_rank = plan.mesh.coordinates(rank)
            model = cluster.clock(rank, workload).seconds(workload, plan.micro_batch_rows, length)
            stages = [ranges[stage] for stage in plan.stage_map.stages_of(pipeline_rank)]
            total = sum((model.stage(*ends) for ends in stages), Seconds())
            # The last micro-batch may have fewer rows, but packed ones are alike.
            count = plan.shares[replica] / plan.micro_batch_rows
            if plan.pack:
                count = plan.microbatches_of(replica)
            update = total.update / workload.batch.grad_accumulation_steps
            found.append(plan.runs * count * total.microbatch + update)
        measured = cluster.profile is not None
        return cls(plan.mesh, tuple(found), plan.shares, plan.together, measured)


@dataclass(slots=True)
class Watch:
    """Compares the world ranks of a run at each report and names a straggler once; one that is slow
    from its first step only where their ``work`` is known."""

    hosts: Sequence[str]
    work: Work | None = None
    _reports: int = 0
    _first: list[Sequence[float]] = field(default_factory=list)
    _in_a_row: dict[tuple[int, str], int] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def observe(self, step: int, measured: Sequence[float]) -> list[Straggler]:
        """Return the new stragglers, by the seconds that each world rank computes in a step. A
        report without some rank is ignored."""
        if len(measured) < 2 or not all(math.isfinite(each) and each > 0 for each in measured):
            return []
        self._reports += 1
        slow: list[Straggler] = []
        if len(self._first) < REPORTS_TO_KNOW:
            self._first.append(measured)
        else:
            slow += self._slower_than_usual(step, measured)
        if self.work is not None and self._reports > 1:
            slow += self._slow_for_their_work(self.work, step, measured)
        before = self._in_a_row
        self._in_a_row = {
            key: before.get(key, 0) + 1 for key in ((each.rank, each.others) for each in slow)
        }
        found = []
        for each in slow:
            is_lasting = self._in_a_row[each.rank, each.others] >= REPORTS_IN_A_ROW
            if is_lasting and each.rank not in self._named:
                self._named.add(each.rank)
                found.append(each)
        return found

    def _slower_than_usual(self, step: int, measured: Sequence[float]) -> Iterator[Straggler]:
        """Yield the ranks that are slower than in the first reports."""
        usual = [median(of_rank) for of_rank in zip(*self._first, strict=True)]
        slowdowns = [seconds / each for seconds, each in zip(measured, usual, strict=True)]
        for rank, slowdown in enumerate(slowdowns):
            others = median(slowdowns[:rank] + slowdowns[rank + 1 :])
            if min(slowdown, slowdown / others) > TOLERANCE:
                seconds = measured[rank]
                yield Straggler(
                    step,
                    rank,
                    self.hosts[rank],
                    seconds,
                    seconds / slowdown * others,
                    "the others, as it did at first",
                    f"something slows it down; look what else runs there, or {_MEASURE}",
                )

    def _slow_for_their_work(
        self, work: Work, step: int, measured: Sequence[float]
    ) -> Iterator[Straggler]:
        """Yield the ranks that take longer for a row than other replicas of their layers, and those
        of stages that take longer for their layers than the other stages."""
        mesh = work.mesh
        paces = [seconds / each for seconds, each in zip(measured, work.of_ranks, strict=True)]
        # The fastest replica stands for its stage: a slow one is no slow stage.
        stages = [min(paces[each] for each in mesh.replicas_of(p)) for p in range(mesh.pp)]
        for rank, pace in enumerate(paces):
            _, p = mesh.coordinates(rank)
            peers = [paces[each] for each in mesh.replicas_of(p) if each != rank]
            others = stages[:p] + stages[p + 1 :]
            tolerance = TOLERANCE if work.is_measured else STAGE_TOLERANCE
            if peers and pace > TOLERANCE * median(peers):
                expected = median(peers)
                beside = "the other replicas of its layers"
                remedy = _for_a_replica(work, measured)
            elif others and stages[p] > tolerance * median(others):
                expected = median(others)
                beside = "the other stages, layer by layer"
                remedy = f"{_MEASURE}, for fewer layers there"
            else:
                continue
            seconds = expected * work.of_ranks[rank]
            yield Straggler(step, rank, self.hosts[rank], measured[rank], seconds, beside, remedy)


def _for_a_replica(work: Work, measured: Sequence[float]) -> str:
    """Return what to do about a slow replica: the rows that end at the same time."""
    seconds = [
        max(measured[rank] for rank in work.mesh.pipeline_of(replica)) / rows
        for replica, rows in enumerate(work.rows)
    ]
    units = rows_by_speed(sum(work.rows) // work.together, seconds)
    rows = tuple(work.together * each for each in units)
    if rows == work.rows:
        return "no other rows fit it better; look what else runs there"
    return f"give --replica-rows {','.join(map(str, rows))}"
