"""From a way of training to what a partitioner must know. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from shardmlx.cluster import Cluster, slowest
from shardmlx.memory import TrainingSetup, rank_peak, stage_memory
from shardmlx.mesh import Mesh
from shardmlx.partitioners import LayerCosts, Problem, get_partitioner
from shardmlx.run_plan import Plan
from shardmlx.schedules import get_schedule
from shardmlx.stage_map import StageMap
from shardmlx.workload import Workload


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of training, before its layers are divided."""

    mesh: Mesh
    schedule: str
    virtual: int
    rows: int
    micro_batch_size: int
    checkpoint: bool

    @property
    def placement(self) -> tuple[int, ...]:
        return get_schedule(self.schedule).placement(self.mesh.pp, self.virtual)

    @property
    def microbatches(self) -> int:
        return -(-self.rows // self.micro_batch_size)

    def setup(self, workload: Workload, length: int, backend: str) -> TrainingSetup:
        """What decides its memory with sequences of ``length`` tokens."""
        return workload.setup(
            self.micro_batch_size,
            length,
            checkpoint=self.checkpoint,
            dp=self.mesh.dp,
            backend=backend,
        )


def plan_of(way: Candidate, stage_map: StageMap, workload: Workload) -> Plan:
    """The plan that ``train`` would make of it."""
    return Plan(
        mesh=way.mesh,
        stage_map=stage_map,
        schedule=way.schedule,
        rows=way.rows,
        micro_batch_size=way.micro_batch_size,
        trainable=trainable_stages(workload, stage_map),
    )


def trainable_stages(workload: Workload, stage_map: StageMap) -> tuple[bool, ...]:
    """Which stages have trained weights."""
    ends = workload.config.unfreeze_all
    layers = workload.shape.num_layers
    return tuple(
        stop > workload.first_trained_layer or (ends and (start == 0 or stop == layers))
        for start, stop in stage_map.partition.ranges
    )


def make_problem(
    way: Candidate,
    workload: Workload,
    cluster: Cluster,
    length: int,
    *,
    longest: int | None = None,
) -> Problem:
    """What a partitioner must know, for sequences of ``length`` tokens.

    Memory is that of sequences of ``longest`` tokens, where that is given. Costs are seconds, or
    FLOPs where the speed of the machines is not known; then links do not count.
    """
    mesh, placement = way.mesh, way.placement
    setup = way.setup(workload, longest or length, cluster.backend)
    message = stage_memory(setup, 0, 1).message

    def between(a: int, b: int) -> float:
        if cluster.unit == "FLOPs":
            return 0.0
        return max(
            cluster.link_seconds(x, y, message) + cluster.latency(x, y)
            for x, y in zip(mesh.replicas_of(a), mesh.replicas_of(b), strict=True)
        )

    return Problem(
        placement=placement,
        costs=rank_costs(way, workload, cluster, length),
        sizes=workload.held_sizes,
        peak=_peaks(way, workload, setup),
        capacity=tuple(
            min(cluster.capacity(each) for each in mesh.replicas_of(rank))
            for rank in range(mesh.pp)
        ),
        transfer=tuple(tuple(between(a, b) for b in range(mesh.pp)) for a in range(mesh.pp)),
        microbatches=way.microbatches,
        unit=cluster.unit,
        hosts=tuple(cluster.machines[mesh.rank(0, rank)].host for rank in range(mesh.pp)),
    )


def rank_costs(
    way: Candidate, workload: Workload, cluster: Cluster, length: int
) -> tuple[LayerCosts, ...]:
    """What a micro-batch costs on each pipeline rank, on the slowest of its replicas."""
    rows = way.micro_batch_size
    clocks = [
        slowest(
            [cluster.clock(each, workload, way.checkpoint) for each in way.mesh.replicas_of(rank)],
            rows,
            length,
        )
        for rank in range(way.mesh.pp)
    ]
    costs = {clock: clock.seconds(rows, length).layer_costs for clock in set(clocks)}
    return tuple(costs[clock] for clock in clocks)


def _peaks(
    way: Candidate, workload: Workload, setup: TrainingSetup
) -> Callable[[int, int, int], float]:
    """Peak bytes of a stage alone on its rank, by its number and its layers.

    Where a rank runs several stages the sum of their peaks is more than its own peak.
    """
    # As if every layer were trained: no stage can hold more.
    uniform = get_partitioner("uniform")
    stage_map = uniform(
        Problem.homogeneous(
            LayerCosts((1.0,) * max(len(way.placement), workload.shape.num_layers)), way.placement
        )
    )
    actions = plan_of(
        way, stage_map, replace(workload, config=replace(workload.config, num_layers=-1))
    ).actions
    of_stage = [
        tuple(action for action in actions[rank] if action.stage == stage)
        for stage, rank in enumerate(way.placement)
    ]
    layers = workload.shape.num_layers

    @cache
    def peak(stage: int, length: int, trained: int, at_start: bool, at_end: bool) -> float:
        # Layers are alike: any range with as many, and as many trained, holds as much.
        start = 0 if at_start else (layers - length if at_end else _start(length, trained))
        memory = stage_memory(setup, start, start + length)
        return rank_peak(of_stage[stage], {stage: memory}, setup)

    def _start(length: int, trained: int) -> int:
        start = workload.first_trained + trained - length
        return min(max(1, start), layers - length - 1)

    def of_range(stage: int, start: int, stop: int) -> float:
        trained = max(0, stop - max(start, workload.first_trained))
        return peak(stage, stop - start, trained, start == 0, stop == layers)

    return of_range
