"""Predict a plan on its machines: memory of every rank, time of a step. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from shardmlx.config.specs import NONE
from shardmlx.costmodel.cluster import Cluster, between_ranks, pipeline_seconds
from shardmlx.costmodel.memory import StageMemory, held_once, stage_memory
from shardmlx.costmodel.memory_limits import PlannedMemory
from shardmlx.costmodel.rank_peak import PeakOfActions
from shardmlx.costmodel.replica_messages import Messages
from shardmlx.costmodel.timing import Seconds
from shardmlx.costmodel.workload import Workload
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """A pipeline rank, with the slowest and smallest of its replicas; ``seconds`` are of one
    micro-batch through all its stages, ``capacity`` is ``inf`` if unknown."""

    hosts: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    weights: float
    peak: float
    capacity: float
    seconds: Seconds
    busy: float
    exposed: float
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of a step, with its share of sums over replicas and of the update."""

    plan: Plan
    ranks: tuple[RankPrediction, ...]
    simulation: Simulation
    reduce_seconds: float
    update_seconds: float
    tokens: int

    @property
    def step_seconds(self) -> float:
        return self.simulation.makespan + self.reduce_seconds + self.update_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds


def predict_memory(
    plan: Plan, workload: Workload, cluster: Cluster, length: int
) -> tuple[list[PlannedMemory], dict[int, StageMemory]]:
    """Return (memory of each pipeline rank, of each stage) with ``length`` tokens."""
    setup = cluster.setup(workload, plan.micro_batch_size, length, plan.mesh.dp)
    stages = {
        index: stage_memory(setup, *ends)
        for index, ends in enumerate(plan.stage_map.partition.ranges)
    }
    of_ranks = []
    for rank, actions in enumerate(plan.actions):
        own = {index: stages[index] for index in plan.stage_map.stages_of(rank)}
        resident = sum(stage.resident for stage in own.values()) - held_once(own.values())
        of_ranks.append(PlannedMemory(PeakOfActions(actions).of(own, setup), resident))
    return of_ranks, stages


def planned_memory(
    plan: Plan, workload: Workload, cluster: Cluster, lengths: tuple[int, int]
) -> tuple[PlannedMemory, ...]:
    """Return the memory of each world rank; ``lengths`` are T of a step's longest micro-batch, and
    of the longest forward-only one, 0 if there is none."""
    step, _ = predict_memory(plan, workload, cluster, lengths[0])
    if lengths[1]:
        forward = replace(
            workload,
            fine_tune=replace(workload.fine_tune, train=False),
            batch=replace(workload.batch, recompute=NONE),
        )
        passing, _ = predict_memory(plan, forward, cluster, lengths[1])
        step = [
            replace(a, peak=max(a.peak, a.resident + b.peak - b.resident))
            for a, b in zip(step, passing, strict=True)
        ]
    return tuple(step[plan.mesh.coordinates(rank)[1]] for rank in range(plan.mesh.size))


def _pipeline(
    messages: Messages, length: int, replica: int | None
) -> tuple[Simulation, list[Seconds]]:
    """Return the step of a ``replica``, or of the slowest, and a micro-batch's times by stage."""
    plan, cluster = messages.plan, messages.cluster
    mesh, stage_map, size = plan.mesh, plan.stage_map, plan.micro_batch_size
    models = pipeline_seconds(messages.workload, cluster, mesh, size, length, replica)
    stages = [
        messages.with_gathers(models[rank].stage(*ends), rank, ends)
        for rank, ends in zip(stage_map.placement, stage_map.partition.ranges, strict=True)
    ]
    if replica is not None:
        # The last micro-batch may have few rows.
        full = plan.shares[replica] / (plan.microbatches_of(replica) * size)
        stages = [each.of_share(full) for each in stages]
    link = partial(cluster.link_seconds, nbytes=messages.message)
    simulation = simulate(
        plan.actions_of(replica or 0),
        stage_map.placement,
        [each.costs for each in stages],
        link=between_ranks(mesh, link, replica),
        latency=between_ranks(mesh, cluster.latency, replica),
    )
    return simulation, stages


def predict(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> Prediction:
    """Predict a step with sequences of ``length`` tokens on ``cluster.machines[world rank]``."""
    mesh, stage_map = plan.mesh, plan.stage_map
    of_ranks, memories = predict_memory(plan, workload, cluster, length)
    messages = Messages(plan, workload, cluster, memories)
    replicas: list[int | None] = list(range(mesh.dp)) if plan.replica_rows else [None]
    pipelines = [_pipeline(messages, length, each) for each in replicas]
    simulation, stages = max(pipelines, key=lambda each: each[0].makespan)
    seconds = [
        sum((stages[index] for index in stage_map.stages_of(rank)), Seconds())
        for rank in range(mesh.pp)
    ]
    accumulated = workload.batch.grad_accumulation_steps
    updaters = mesh.dp if workload.fine_tune.divides_optimizer else 1
    return Prediction(
        plan=plan,
        ranks=tuple(
            RankPrediction(
                hosts=tuple(cluster.machines[each].host for each in mesh.replicas_of(rank)),
                ranges=tuple(
                    stage_map.partition.ranges[index] for index in stage_map.stages_of(rank)
                ),
                weights=_weights(workload, [memories[i] for i in stage_map.stages_of(rank)]),
                peak=of_ranks[rank].peak,
                capacity=min(cluster.capacity(each) for each in mesh.replicas_of(rank)),
                seconds=seconds[rank],
                busy=simulation.busy[rank],
                exposed=simulation.exposed[rank],
                bubble=simulation.bubbles[rank],
            )
            for rank in range(mesh.pp)
        ),
        simulation=simulation,
        reduce_seconds=messages.sum_seconds() / accumulated,
        update_seconds=max(each.update for each in seconds) / accumulated / updaters,
        tokens=sum(plan.shares) * length,
    )


def _weights(workload: Workload, stages: list[StageMemory]) -> float:
    """Return the bytes of a rank's parameters, counting those that two of its stages share once."""
    twice = sum(stage.tied > 0 for stage in stages) == 2
    rooms = [stage.room for stage in stages]
    shared = sum(rooms) - max(rooms) + twice * workload.weight_sizes.embedding
    return sum(stage.weights for stage in stages) - shared
