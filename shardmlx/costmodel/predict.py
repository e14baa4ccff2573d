"""Predict a plan on its machines: memory of every rank, time of a step. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardmlx.costmodel.cluster import Cluster, between_ranks, pipeline_seconds
from shardmlx.costmodel.memory import StageMemory, rank_peak, stage_memory
from shardmlx.costmodel.timing import Seconds
from shardmlx.costmodel.training_setup import FLOAT32
from shardmlx.costmodel.workload import Workload
from shardmlx.distributed.sum_parts import levels_of
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """A pipeline rank, with the slowest and smallest of its replicas.

    ``seconds`` are of one micro-batch through all its stages, ``update`` among them of a step;
    ``capacity`` is ``inf`` where it is not known.
    """

    hosts: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    weights: float
    peak: float
    capacity: float
    seconds: Seconds
    busy: float
    exposed: float
    bubble: float

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of a step: F and B of all micro-batches, sums over replicas, update.

    Where gradients of several steps make one update, a step has its share of sums and update.
    """

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
    plan: Plan, workload: Workload, length: int, *, recompute: str, backend: str
) -> tuple[list[int], dict[int, StageMemory]]:
    """Return (peak bytes of each pipeline rank, memory of each stage) with ``length`` tokens."""
    setup = workload.setup(
        plan.micro_batch_size, length, recompute=recompute, dp=plan.mesh.dp, backend=backend
    )
    stages = {
        index: stage_memory(setup, *ends)
        for index, ends in enumerate(plan.stage_map.partition.ranges)
    }
    peaks = []
    for rank, actions in enumerate(plan.actions):
        own = {index: stages[index] for index in plan.stage_map.stages_of(rank)}
        peaks.append(rank_peak(actions, own, setup))
    return peaks, stages


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """A step of the ranks of a replica; ``stages`` are the times of a micro-batch."""

    stages: list[Seconds]
    simulation: Simulation


def _pipeline(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    length: int,
    *,
    recompute: str,
    message: int,
    replica: int | None,
) -> _Pipeline:
    """Return what one ``replica`` does, or the slowest of all where they have equal rows."""
    mesh, stage_map, size = plan.mesh, plan.stage_map, plan.micro_batch_size
    models = pipeline_seconds(
        workload, cluster, mesh, size, length, recompute=recompute, replica=replica
    )
    stages = [
        _with_gathers(models[rank].stage(*ends), rank, ends, plan, workload, cluster)
        for rank, ends in zip(stage_map.placement, stage_map.partition.ranges, strict=True)
    ]
    if replica is not None:
        # Its last micro-batch may have few rows.
        full = plan.shares[replica] / (plan.microbatches_of(replica) * size)
        stages = [each.of_share(full) for each in stages]
    simulation = simulate(
        plan.actions_of(replica or 0),
        stage_map.placement,
        [each.costs for each in stages],
        link=between_ranks(mesh, lambda a, b: cluster.link_seconds(a, b, message), replica),
        latency=between_ranks(mesh, cluster.latency, replica),
    )
    return _Pipeline(stages, simulation)


def _with_gathers(
    stage: Seconds,
    rank: int,
    ends: tuple[int, int],
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
) -> Seconds:
    """Return the times of a stage that gathers each layer, where replicas divide the weights.

    A layer comes while the one before computes, the first while nothing does. A matrix at an end
    stays until it is updated, unless the stage has another one. In the backward pass layers come
    down to the lowest that computes then, and their gradients go to their owners on the same link.
    """
    mesh, tune, (start, stop) = plan.mesh, workload.fine_tune, ends
    if mesh.dp == 1 or not tune.divides_weights:
        return stage

    def seconds(nbytes: float) -> float:
        return _ring_seconds(cluster, plan, rank, nbytes)

    sizes, shape = workload.weight_sizes, workload.shape
    layers = sizes.layers[start:stop]
    has_both = start == 0 and stop == shape.num_layers
    at_ends = sizes.embedding * (start == 0)
    if stop == shape.num_layers:
        at_ends += (sizes if has_both else workload.held_sizes).head
    gathered = at_ends
    if shape.tied or not has_both:
        gathered = at_ends / plan.microbatches if tune.unfreeze_all else 0.0
    first = seconds(max(layers))
    forward = max(stage.forward, seconds(sum(layers) + gathered)) + first
    backward = stage.input_gradient + stage.weight_gradient
    if not backward:
        return replace(stage, forward=forward)
    trained = 0.0
    if tune.is_full:
        trained = sum(sizes.layers[max(start, workload.first_trained_layer) : stop])
        trained += at_ends * tune.unfreeze_all
    gradients = workload.sum_bytes(round(trained) // workload.dtype_bytes * FLOAT32)
    needed = sum(sizes.layers[max(start, workload.first_trained) : stop])
    sent = seconds(needed) + seconds(gradients)
    backward = max(backward, sent) + first
    if stage.input_gradient:
        return Seconds(forward, backward, 0.0, stage.update)
    return Seconds(forward, 0.0, backward, stage.update)


def predict(
    plan: Plan, workload: Workload, cluster: Cluster, length: int, *, recompute: str = "none"
) -> Prediction:
    """Predict a step with sequences of ``length`` tokens on ``cluster.machines[world rank]``."""
    mesh, stage_map = plan.mesh, plan.stage_map
    peaks, memories = predict_memory(
        plan, workload, length, recompute=recompute, backend=cluster.backend
    )
    message = workload.sent(max(each.message for each in memories.values()))
    replicas: list[int | None] = list(range(mesh.dp)) if plan.replica_rows else [None]
    pipelines = [
        _pipeline(
            plan, workload, cluster, length, recompute=recompute, message=message, replica=each
        )
        for each in replicas
    ]
    slowest = max(pipelines, key=lambda each: each.simulation.makespan)
    stages, simulation = slowest.stages, slowest.simulation
    of_rank = [
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
                peak=peaks[rank],
                capacity=min(cluster.capacity(each) for each in mesh.replicas_of(rank)),
                seconds=of_rank[rank],
                busy=simulation.busy[rank],
                exposed=simulation.exposed[rank],
                bubble=simulation.bubbles[rank],
            )
            for rank in range(mesh.pp)
        ),
        simulation=simulation,
        reduce_seconds=_reduce_seconds(cluster, plan, workload, memories) / accumulated,
        update_seconds=max(each.update for each in of_rank) / accumulated / updaters,
        tokens=sum(plan.shares) * length,
    )


def _weights(workload: Workload, stages: list[StageMemory]) -> float:
    """Return the bytes of a rank's parameters; a tied matrix in two of its stages counts once."""
    twice = sum(stage.tied > 0 for stage in stages) == 2
    return sum(stage.weights for stage in stages) - twice * workload.weight_sizes.embedding


def _reduce_seconds(
    cluster: Cluster, plan: Plan, workload: Workload, stages: dict[int, StageMemory]
) -> float:
    """Return the seconds of summing the slowest stage's gradients over replicas.

    Each sends its share twice, or where they divide the optimizer its gradients once, and then
    updated weights. That is an upper bound: buckets start while the backward pass still computes.
    """
    mesh, stage_map, tune = plan.mesh, plan.stage_map, workload.fine_tune
    if mesh.dp == 1 or tune.divides_weights:
        return 0.0  # what divided weights take is a part of each micro-batch
    times = []
    for rank in range(mesh.pp):
        gradients = sum(stages[index].gradients for index in stage_map.stages_of(rank))
        sent = workload.sum_bytes(gradients)
        back = sent
        if tune.divides_optimizer and tune.is_full:
            back = gradients // FLOAT32 * workload.dtype_bytes
        times.append(_ring_seconds(cluster, plan, rank, sent + back))
    return max(times)


def _ring_seconds(cluster: Cluster, plan: Plan, rank: int, nbytes: float) -> float:
    """Return the seconds in which each replica of a pipeline rank has sent the others its part of
    so many bytes, or has got their parts."""
    ring = plan.mesh.replicas_of(rank)
    slowest_link = max(
        cluster.link_seconds(a, b, nbytes) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
    )
    levels = levels_of(rank, ring, [each.host for each in cluster.machines])
    members = plan.mesh.dp if levels is None else len(levels.between)
    return (members - 1) / members * slowest_link
