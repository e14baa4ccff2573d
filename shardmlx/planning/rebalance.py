"""The stage map that the measured times of a run would want. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.predict import Prediction, predict
from shardmlx.costmodel.timing import Measured, Speed
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.partitioners import Problem, get_partitioner
from shardmlx.partitioners.evenest import evenest
from shardmlx.partitioners.memory import peak_of
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import Partition, StageMap
from shardmlx.planning.partition_problem import Candidate, make_problem, trainable_stages
from shardmlx.planning.stragglers import compute_of_ranks


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """A map, and the seconds of a step that it and the present one should take.

    Both are predicted from the measured speeds, so that they may be compared.
    """

    stage_map: StageMap
    step_seconds: float
    present_seconds: float
    is_new: bool

    def __str__(self) -> str:
        if not self.is_new:
            return (
                f"the present stage map is the best for the measured times: {self.step_seconds:.3f}"
                " s a step predicted"
            )
        sizes = " + ".join(map(str, self.stage_map.partition.sizes))
        return (
            f"layers {sizes} would suit the measured times: {self.step_seconds:.3f} s a step "
            f"predicted, against {self.present_seconds:.3f} s now"
        )


def rebalanced(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    measured: Sequence[float],
    length: int,
    partitioner: str,
) -> Rebalanced | None:
    """Divide the layers anew, by how fast each rank was; ranks, hosts and schedule stay.

    ``measured``: compute seconds of a step, of each world rank, with sequences of ``length`` on
    average. What is predicted of a rank is scaled to what was measured of it; where the cluster
    has no profile, that takes for a slow machine what is a costly head, and a second run with the
    new map comes nearer. No rank gets beyond its memory, at ``max_seq_length``. The
    ``partitioner`` is asked, and the most even division that fits; the fastest map wins, which is
    the present one if none is faster. None where nothing was measured of some rank.
    """
    longest, recompute = workload.batch.max_seq_length, workload.batch.recomputed
    expected = compute_of_ranks(plan, workload, cluster, length, recompute=recompute)
    if not all(each > 0 for each in (*measured, *expected)):
        return None
    pace = [seconds / cost for seconds, cost in zip(measured, expected, strict=True)]
    paced = PacedCluster.of(cluster, pace)

    def outcome(partition: Partition, tokens: int) -> Prediction:
        stage_map = _divided(plan.stage_map, partition)
        divided = replace(
            plan, stage_map=stage_map, trainable=trainable_stages(workload, stage_map)
        )
        return predict(divided, workload, paced, tokens, recompute=recompute)

    present = plan.stage_map.partition
    problem = _problem(plan, workload, paced, length)
    # A rank that was beyond its memory as predicted, and ran, may stay as full.
    budgets = [max(rank.capacity, rank.peak) for rank in outcome(present, longest).ranks]
    best, now = present, outcome(present, length).step_seconds
    fastest = now
    for partition in dict.fromkeys(_answers(problem, partitioner, budgets)):
        full = outcome(partition, longest)
        if any(rank.peak > room for rank, room in zip(full.ranks, budgets, strict=True)):
            continue
        seconds = outcome(partition, length).step_seconds
        if seconds < fastest:
            best, fastest = partition, seconds
    return Rebalanced(_divided(plan.stage_map, best), fastest, now, best != present)


def _divided(stage_map: StageMap, partition: Partition) -> StageMap:
    return replace(stage_map, partition=partition, path=None)


def _problem(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> Problem:
    batch, stage_map = workload.batch, plan.stage_map
    way = Candidate(
        plan.mesh,
        plan.schedule,
        stage_map.virtual,
        plan.rows,
        plan.micro_batch_size,
        batch.recomputed,
    )
    problem = make_problem(way, workload, cluster, length, longest=batch.max_seq_length)
    # The map may number the ranks in another order than the schedule.
    return replace(problem, placement=stage_map.placement, is_measured=True)


def _answers(problem: Problem, partitioner: str, budgets: Sequence[float]) -> Iterator[Partition]:
    """Yield the run's partitioner's answer, if ranks keep their places, and a balanced one."""
    try:
        answer = get_partitioner(partitioner)(problem)
    except UserError:
        # It does not divide for this schedule, or wants what is not known.
        pass
    else:
        if answer.placement == problem.placement:
            yield answer.partition
    peak, placement = peak_of(problem), problem.placement

    def load(stage: int, start: int, stop: int) -> float:
        rank = placement[stage]
        if peak(stage, start, stop) > budgets[rank] / len(problem.stages_of(rank)):
            return float("inf")
        return problem.costs[rank].total(start, stop)

    yield evenest(problem.num_layers, problem.num_stages, load)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedCluster(Cluster):
    """A cluster whose rank r takes ``pace[r]`` seconds for each unit predicted of ``base``."""

    base: Cluster
    pace: tuple[float, ...]

    @classmethod
    def of(cls, base: Cluster, pace: Sequence[float]) -> PacedCluster:
        known = {each.name: getattr(base, each.name) for each in fields(Cluster)}
        return cls(**known, base=base, pace=tuple(pace))

    @property
    def unit(self) -> str:
        return "seconds"

    def clock(self, rank: int, workload: Workload, recompute: str) -> Speed | Measured:
        clock, pace = self.base.clock(rank, workload, recompute), self.pace[rank]
        if isinstance(clock, Speed):
            return replace(clock, flops=clock.flops / pace)
        return replace(
            clock,
            samples=tuple(
                replace(
                    sample,
                    layer=sample.layer.scaled(pace),
                    frozen=sample.frozen.scaled(pace),
                    embedding=sample.embedding.scaled(pace),
                    head=sample.head.scaled(pace),
                )
                for sample in clock.samples
            ),
        )
