"""Pose the problem that a partitioner solves for one way of training. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from shardmlx.costmodel.cluster import Cluster, between_ranks, pipeline_seconds
from shardmlx.costmodel.memory import StageMemory, stage_memory
from shardmlx.costmodel.rank_peak import PeakOfActions
from shardmlx.costmodel.training_setup import TrainingSetup
from shardmlx.costmodel.workload import Workload
from shardmlx.partitioners import LayerCosts, Problem, get_partitioner
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way of training, before its layers are divided."""

    mesh: Mesh
    schedule: str
    virtual: int
    rows: int
    micro_batch_size: int
    recompute: str

    @property
    def placement(self) -> tuple[int, ...]:
        return get_schedule(self.schedule).placement(self.mesh.pp, self.virtual)

    @property
    def microbatches(self) -> int:
        return -(-self.rows // self.micro_batch_size)


def plan_of(way: Candidate, stage_map: StageMap, workload: Workload) -> Plan:
    """Return the plan of a way."""
    return Plan(
        mesh=way.mesh,
        stage_map=stage_map,
        schedule=way.schedule,
        rows=way.rows,
        micro_batch_size=way.micro_batch_size,
        trainable=trainable_stages(workload, stage_map),
        pack=bool(workload.batch.pack),
    )


def trainable_stages(workload: Workload, stage_map: StageMap) -> tuple[bool, ...]:
    """Return for each stage whether it has trained weights."""
    ends = workload.fine_tune.unfreeze_all
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
    """Return a partitioner's problem, for sequences of ``length`` tokens.

    Memory is for sequences of ``longest`` tokens, if given. Costs are seconds, or FLOPs if the
    speed of the machines is unknown; links then do not count.
    """
    mesh, placement = way.mesh, way.placement
    size, recompute = way.micro_batch_size, way.recompute
    setup = workload.setup(
        size,
        longest or length,
        recompute=recompute,
        dp=mesh.dp,
        backend=cluster.backend,
        profile=cluster.profile,
    )
    models = pipeline_seconds(workload, cluster, mesh, size, length, recompute=recompute)
    costs = {id(model): model.layer_costs for model in models}
    capacity = tuple(
        min(cluster.capacity(each) for each in mesh.replicas_of(rank)) for rank in range(mesh.pp)
    )

    def transfer(a: int, b: int) -> float:
        if cluster.unit == "FLOPs":
            return 0.0
        return cluster.link_seconds(a, b, setup.message) + cluster.latency(a, b)

    return Problem(
        placement=placement,
        costs=tuple(costs[id(model)] for model in models),
        sizes=workload.held_sizes,
        peak=None if all(map(math.isinf, capacity)) else _peaks(way, workload, setup),
        capacity=capacity,
        transfer=between_ranks(mesh, transfer),
        microbatches=way.microbatches,
        hosts=tuple(cluster.machines[mesh.rank(0, rank)].host for rank in range(mesh.pp)),
    )


def _peaks(
    way: Candidate, workload: Workload, setup: TrainingSetup
) -> Callable[[int, int, int], float]:
    """Return the peak bytes of a stage alone on its rank, by its number and its layers.

    The stages of a rank may have peaks that add up to more than its own.
    """
    # Every stage has all kinds of actions here; its layers decide which of them it needs.
    uniform = get_partitioner("uniform")
    stage_map = uniform(
        Problem.homogeneous(LayerCosts((1.0,) * workload.shape.num_layers), way.placement)
    )
    everything = replace(workload, fine_tune=replace(workload.fine_tune, num_layers=-1))
    actions = plan_of(way, stage_map, everything).actions
    of_stage = [
        PeakOfActions([action for action in actions[rank] if action.stage == stage])
        for stage, rank in enumerate(way.placement)
    ]

    shape, first = workload.shape, workload.first_trained_layer
    layers = shape.num_layers
    upto = list(accumulate(workload.weight_sizes.layers, initial=0.0))
    # Number of layers of each kind below a layer.
    below = [
        list(accumulate((each == kind for each in shape.pattern), initial=0))
        for kind in range(len(shape.kinds))
    ]
    numbers: dict[tuple[Hashable, ...], int] = {}
    memories: list[StageMemory] = []
    known: dict[tuple[int, int], int] = {}

    @cache
    def look(start: int, stop: int) -> int:
        """Return the number of a range of layers, equal for ranges with equal memory."""
        lowest = min(max(start, first), stop)
        frozen = tuple(each[lowest] - each[start] for each in below)
        trained = tuple(each[stop] - each[lowest] for each in below)
        ends = (start == 0, stop == layers, start > first)
        number = numbers.setdefault(
            (frozen, trained, upto[stop] - upto[start], *ends), len(numbers)
        )
        if number == len(memories):
            memories.append(stage_memory(setup, start, stop))
        return number

    def peak(stage: int, start: int, stop: int) -> float:
        number = look(start, stop)
        if (stage, number) not in known:
            known[stage, number] = of_stage[stage].of({stage: memories[number]}, setup)
        return known[stage, number]

    return peak
