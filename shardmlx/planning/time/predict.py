"""Predict a plan on its machines: memory of every rank, time of a step. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from shardmlx.config.specs import NONE
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.simulate import Simulation, simulate
from shardmlx.pipeline.steady_state import makespan
from shardmlx.planning.facts.cluster import Cluster, between_ranks, pipeline_seconds
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.limits import PlannedMemory
from shardmlx.planning.memory.ranks import peaks_of_ranks
from shardmlx.planning.memory.stages import StageMemory, held_once, stage_memory
from shardmlx.planning.memory.training_setup import TrainingSetup
from shardmlx.planning.time.parts import Seconds
from shardmlx.planning.time.replica_messages import Messages


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
        """Seconds of a step with its sums over replicas and its share of an update."""
        return self.simulation.makespan + self.reduce_seconds + self.update_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all replicas, padding among them."""
        return self.tokens / self.step_seconds


def memory_of_stages(plan: Plan, setup: TrainingSetup) -> dict[int, StageMemory]:
    """Return the bytes of each stage of a plan, by its number."""
    ranges = plan.stage_map.partition.ranges
    return {index: stage_memory(setup, *ends) for index, ends in enumerate(ranges)}


def predict_memory(
    plan: Plan, workload: Workload, cluster: Cluster, length: int
) -> tuple[list[PlannedMemory], dict[int, StageMemory]]:
    """Return (memory of each pipeline rank, of each stage) with ``length`` tokens."""
    setup = cluster.setup(workload, plan.micro_batch_rows, length, plan.mesh.dp)
    stages = memory_of_stages(plan, setup)
    of_ranks = []
    for rank, peak in enumerate(peaks_of_ranks(plan.shortest_alike)):
        own = {index: stages[index] for index in plan.stage_map.stages_of(rank)}
        resident = sum(stage.resident for stage in own.values()) - held_once(own.values())
        of_ranks.append(PlannedMemory(peak.of(own, setup), resident))
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


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """The pipeline of a replica, or of the slowest: the times of a micro-batch in each stage, and
    of messages from rank to rank."""

    plan: Plan
    microbatches: int
    stages: tuple[Seconds, ...]
    link: tuple[tuple[float, ...], ...]
    latency: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, messages: Messages, length: int, replica: int | None) -> Self:
        """Return the pipeline of a ``replica``, or of the slowest of equal ones."""
        plan = messages.plan
        cluster = messages.cluster
        mesh = plan.mesh
        stage_map = plan.stage_map
        size = plan.micro_batch_rows
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
        return cls(
            plan=plan,
            microbatches=plan.runs * plan.microbatches_of(replica or 0),
            stages=tuple(stages),
            link=between_ranks(mesh, link, replica),
            latency=between_ranks(mesh, cluster.latency, replica),
        )

    def simulated(self, microbatches: int) -> Simulation:
        """Return a step of so many micro-batches."""
        return simulate(
            self.plan.computing(microbatches),
            self.plan.stage_map.placement,
            [each.costs for each in self.stages],
            link=self.link,
            latency=self.latency,
        )

    @property
    def makespan(self) -> float:
        """Seconds of a step of all micro-batches, which are not all simulated."""
        pp = self.plan.mesh.pp
        schedule = get_schedule(self.plan.schedule)
        return makespan(
            self.microbatches,
            schedule.fewest_alike(pp, self.microbatches),
            schedule.period(pp),
            self.plan.stage_map.placement,
            self.link,
            self.simulated,
        )


def _pipelines(messages: Messages, length: int) -> list[_Pipeline]:
    """Return the pipeline of each replica, or one for all if they have equal rows."""
    plan = messages.plan
    replicas: list[int | None] = list(range(plan.mesh.dp)) if plan.replica_rows else [None]
    return [_Pipeline.of(messages, length, each) for each in replicas]


def _seconds_of_ranks(plan: Plan, stages: Sequence[Seconds]) -> list[Seconds]:
    return [
        sum((stages[index] for index in plan.stage_map.stages_of(rank)), Seconds())
        for rank in range(plan.mesh.pp)
    ]


def _reduce_seconds(messages: Messages) -> float:
    """Return the seconds of sums over replicas, as a share of each step."""
    return messages.sum_seconds() / messages.workload.batch.grad_accumulation_steps


def _update_seconds(messages: Messages, ranks: Sequence[Seconds]) -> float:
    """Return the seconds of the optimizer's update, as a share of each step."""
    workload = messages.workload
    updaters = messages.plan.mesh.dp if workload.fine_tune.divides_optimizer else 1
    accumulated = workload.batch.grad_accumulation_steps
    return max(each.update for each in ranks) / accumulated / updaters


def predict_seconds(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> float:
    """Return the seconds of a step, as ``predict`` does, at a cost that does not grow with the
    number of micro-batches."""
    setup = cluster.setup(workload, plan.micro_batch_rows, length, plan.mesh.dp)
    messages = Messages(plan, workload, cluster, memory_of_stages(plan, setup))
    pipelines = _pipelines(messages, length)
    makespans = [each.makespan for each in pipelines]
    longest = max(makespans)
    slowest = pipelines[makespans.index(longest)]
    update = _update_seconds(messages, _seconds_of_ranks(plan, slowest.stages))
    return longest + _reduce_seconds(messages) + update


def predict(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> Prediction:
    """Predict a step with sequences of ``length`` tokens on ``cluster.machines[world rank]``."""
    mesh = plan.mesh
    stage_map = plan.stage_map
    of_ranks, memories = predict_memory(plan, workload, cluster, length)
    messages = Messages(plan, workload, cluster, memories)
    simulated = [(each.simulated(each.microbatches), each) for each in _pipelines(messages, length)]
    simulation, slowest = max(simulated, key=lambda each: each[0].makespan)
    seconds = _seconds_of_ranks(plan, slowest.stages)
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
        reduce_seconds=_reduce_seconds(messages),
        update_seconds=_update_seconds(messages, seconds),
        tokens=sum(plan.shares) * length,
    )


def _weights(workload: Workload, stages: list[StageMemory]) -> float:
    """Return the bytes of a rank's parameters, counting those that two of its stages share once."""
    twice = sum(stage.tied > 0 for stage in stages) == 2
    rooms = [stage.room for stage in stages]
    shared = sum(rooms) - max(rooms) + twice * workload.weight_sizes.embedding
    return sum(stage.weights for stage in stages) - shared
