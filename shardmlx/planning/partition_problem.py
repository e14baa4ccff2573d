"""Pose the problem that a partitioner solves for one way of training. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cache
from itertools import accumulate

from shardmlx.costmodel.cluster import Cluster, between_ranks, pipeline_seconds
from shardmlx.costmodel.memory import StageMemory, stage_memory
from shardmlx.costmodel.rank_peak import PeakOfActions
from shardmlx.costmodel.training_setup import TrainingSetup
from shardmlx.costmodel.workload import Workload
from shardmlx.partitioners import Problem
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import StageMap


def trainable_stages(workload: Workload, stage_map: StageMap) -> tuple[bool, ...]:
    """Return for each stage whether it has trained weights."""
    ends = workload.fine_tune.unfreeze_all
    layers = workload.shape.num_layers
    return tuple(
        stop > workload.first_trained_layer or (ends and (start == 0 or stop == layers))
        for start, stop in stage_map.partition.ranges
    )


def make_problem(
    draft: Plan, workload: Workload, cluster: Cluster, length: int, longest: int
) -> Problem:
    """Return a partitioner's problem, for sequences of ``length`` tokens.

    In the ``draft`` every stage is trained, and its layers do not count. Memory is for sequences of
    ``longest`` tokens. Costs are seconds, or FLOPs if the speed of the machines is unknown; links
    then do not count.
    """
    mesh, size = draft.mesh, draft.micro_batch_size
    setup = cluster.setup(workload, size, longest, mesh.dp)
    models = pipeline_seconds(workload, cluster, mesh, size, length)
    costs = {id(model): model.layer_costs for model in models}
    capacity = tuple(
        min(cluster.capacity(each) for each in mesh.replicas_of(rank)) for rank in range(mesh.pp)
    )

    def transfer(a: int, b: int) -> float:
        if cluster.unit == "FLOPs":
            return 0.0
        return cluster.link_seconds(a, b, setup.message) + cluster.latency(a, b)

    return Problem(
        placement=draft.stage_map.placement,
        costs=tuple(costs[id(model)] for model in models),
        sizes=workload.held_sizes,
        peak=None if all(map(math.isinf, capacity)) else _peaks(draft, setup),
        capacity=capacity,
        transfer=between_ranks(mesh, transfer),
        microbatches=draft.microbatches,
        hosts=tuple(cluster.machines[mesh.rank(0, rank)].host for rank in range(mesh.pp)),
    )


def _peaks(draft: Plan, setup: TrainingSetup) -> Callable[[int, int, int], float]:
    """Return the peak bytes of a stage alone on its rank, by its number and its layers.

    The stages of a rank may have peaks that add up to more than its own.
    """
    # Every stage has all kinds of actions here; its layers decide which of them it needs.
    of_stage = [
        PeakOfActions([action for action in draft.actions[rank] if action.stage == stage])
        for stage, rank in enumerate(draft.stage_map.placement)
    ]

    shape, first = setup.shape, setup.workload.first_trained_layer
    layers = shape.num_layers
    upto = list(accumulate(setup.workload.weight_sizes.layers, initial=0.0))
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
