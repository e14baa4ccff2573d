"""A run's stage map, micro-batches and rows of replicas, from its options. No MLX, no MPI.

A partitioner divides the layers; the problem that it solves is posed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from shardmlx.config.specs import RunSpec
from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts, Problem, fastest_order, get_partitioner
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.cluster import Cluster, between_ranks, pipeline_seconds
from shardmlx.planning.facts.hostfile import Machine, same_host
from shardmlx.planning.facts.plan_facts import PlanFacts
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.ranks import PeaksOfLayers

MICROBATCHES_A_RANK = 4
"""Micro-batches for each rank, so that 1F1B's bubble is at most a fifth."""


def lay_out(way: RunSpec, facts: PlanFacts) -> Plan:
    """Return the plan of a run without open options; ``DoesNotFitError`` if the partitioner finds
    no room, another ``UserError`` if the run cannot be laid out."""
    layout = way.layout
    given = facts.stage_map
    cluster = facts.cluster
    workload = facts.work(way)
    length = facts.lengths.mean(way.batch.pack)
    mesh = Mesh.for_world(cluster.size, layout.pipeline_stages or cluster.size)
    rows, size = divide_batch(way, mesh)
    chosen = get_schedule(layout.schedule)
    placement = chosen.placement(mesh.pp, chosen.default_virtual)
    stage_map = given or StageMap.from_sizes([1] * len(placement), placement)
    plan = Plan(
        mesh=mesh,
        stage_map=stage_map,
        schedule=layout.schedule,
        rows=rows,
        micro_batch_rows=size,
        trainable=(True,) * stage_map.num_stages,
        pack=bool(workload.batch.pack),
        widths=facts.lengths.widths,
        together=way.loss.together,
        runs=way.runs,
    )
    if given is None:
        problem = _problem(plan, workload, facts, length)
        partitioner = get_partitioner(layout.partitioner)
        if layout.partitioner == "hetero":
            partitioner = fastest_order  # it may fail in many ways, of which one is shown
        stage_map = partitioner(problem)
    plan = replace(plan, stage_map=stage_map, trainable=trainable_stages(workload, stage_map))
    return with_replica_rows(plan, workload, cluster, length)


def trainable_stages(workload: Workload, stage_map: StageMap) -> tuple[bool, ...]:
    """Return for each stage whether it has trained weights."""
    ends = workload.fine_tune.unfreeze_all
    layers = workload.shape.num_layers
    return tuple(
        stop > workload.first_trained_layer or (ends and (start == 0 or stop == layers))
        for start, stop in stage_map.partition.ranges
    )


def _problem(draft: Plan, workload: Workload, facts: PlanFacts, length: int) -> Problem:
    """Return a partitioner's problem, with costs for ``length`` tokens and memory for the longest.

    In the ``draft`` every stage is trained, and its layers do not count. Costs are seconds, or
    FLOPs if speeds are unknown; links then do not count.
    """
    mesh = draft.mesh
    cluster = facts.cluster
    size = draft.micro_batch_rows
    setup = cluster.setup(workload, size, facts.lengths.longest[0], mesh.dp)
    models = pipeline_seconds(workload, cluster, mesh, size, length)
    capacity = tuple(
        min(cluster.capacity(each) for each in mesh.replicas_of(rank)) for rank in range(mesh.pp)
    )
    return Problem(
        placement=draft.stage_map.placement,
        costs=tuple(model.layer_costs for model in models),
        sizes=workload.held_sizes,
        peak=None if all(map(math.isinf, capacity)) else PeaksOfLayers(draft, setup, facts.beside),
        first_trained=workload.first_trained,
        capacity=capacity,
        transfer=between_ranks(mesh, partial(_transfer, cluster, setup.message)),
        microbatches=draft.microbatches,
        hosts=tuple(cluster.machines[mesh.rank(0, rank)].host for rank in range(mesh.pp)),
    )


def _transfer(cluster: Cluster, nbytes: int, a: int, b: int) -> float:
    """Return the seconds of a message from rank ``a`` to ``b``; 0 where speeds are unknown."""
    if cluster.unit == "FLOPs":
        return 0.0
    return cluster.link_seconds(a, b, nbytes) + cluster.latency(a, b)


def make_mesh(stage_map: StageMap, world_size: int, hosts: Sequence[str]) -> Mesh:
    """Return the mesh of the world's ranks; ``UserError`` unless they are on the map's hosts."""
    if world_size % stage_map.pp:
        raise UserError(
            f"{stage_map} needs {stage_map.pp} ranks, or a multiple of it for data parallelism, "
            f"and there are {world_size}",
            f"start mpirun with -n {stage_map.pp}",
        )
    mesh = Mesh.for_world(world_size, stage_map.pp)
    for pipeline_rank in range(mesh.pp):
        wanted = stage_map.host_of(pipeline_rank)
        rank = mesh.rank(0, pipeline_rank)
        if wanted is not None and not same_host(wanted, hosts[rank]):
            raise UserError(
                f"{stage_map} wants rank {pipeline_rank} on host {wanted}, but it runs on "
                f"{hosts[rank]}",
                "change the order of the hostfile, or the map",
            )
    return mesh


def costs_by_speed(
    costs: LayerCosts, machines: Sequence[Machine], num_stages: int
) -> tuple[LayerCosts, ...]:
    """Return the costs on the machine of each stage; alike if the speed of one is unknown."""
    speeds = [machine.flops for machine in machines if machine.flops is not None]
    if len(speeds) != num_stages:
        return (costs,) * num_stages
    return tuple(costs.scaled(1 / speed) for speed in speeds)


def divide_batch(run: RunSpec, mesh: Mesh) -> tuple[int, int]:
    """Return (most rows of a replica, rows of a micro-batch); ``UserError`` if that fails."""
    batch = run.batch
    together = run.loss.together
    units = batch.batch_size // together
    rows = together * -(-units // mesh.dp)
    given = batch.given_rows
    for name, number in (
        ("--batch-size", batch.batch_size),
        ("--micro-batch-size", batch.micro_batch_size or 0),
        *(("--replica-rows", each) for each in given),
    ):
        if number % together:
            raise UserError(
                f"{name} {number}: {run.loss.objective} takes pairs, each of {together} sequences",
                f"use a multiple of {together}",
            )
    if mesh.dp > 1 and given:
        if len(given) != mesh.dp or sum(given) != batch.batch_size:
            raise UserError(
                f"--replica-rows {batch.replica_rows} are {sum(given)} rows of {len(given)} "
                f"replicas, and there are {mesh.dp} for --batch-size {batch.batch_size}",
                "give the rows of each replica, or auto",
            )
        rows = max(given)
    elif units % mesh.dp and batch.replica_rows is None:
        raise UserError(
            f"--batch-size {batch.batch_size} cannot be divided among {mesh.dp} replicas",
            f"use a multiple of {together * mesh.dp}, or --replica-rows auto",
        )
    elif units < mesh.dp:
        raise UserError(
            f"--batch-size {batch.batch_size} leaves some of {mesh.dp} replicas without a row",
            f"use {together * mesh.dp} or more",
        )
    if batch.micro_batch_size is None:
        fewest = MICROBATCHES_A_RANK * mesh.pp * together
        return rows, rows if mesh.pp == 1 else together * max(1, rows // fewest)
    if batch.micro_batch_size > rows:
        raise UserError(
            f"--micro-batch-size {batch.micro_batch_size} is more than the {rows} rows that each "
            f"of {mesh.dp} replicas has of --batch-size {batch.batch_size}",
            f"use at most {rows}",
        )
    return rows, batch.micro_batch_size


def with_replica_rows(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> Plan:
    """Return the plan with the rows of each replica that ``--replica-rows`` asks for.

    The loss is a mean over all tokens of the batch: their division changes only the order of sums.
    ``UserError`` for an unknown speed, or if replicas would gather weights unequally often.
    """
    batch = workload.batch
    dp = plan.mesh.dp
    if batch.replica_rows is None or dp == 1:
        return plan
    together = plan.together
    rows = batch.given_rows or tuple(
        together * each
        for each in rows_by_speed(
            batch.batch_size // together, _seconds_of_replicas(plan, workload, cluster, length)
        )
    )
    size = plan.micro_batch_rows
    if batch.micro_batch_size is None and size == plan.rows:
        size = max(rows)  # all rows of a replica are one micro-batch
    unequal = rows if len(set(rows)) > 1 else ()
    plan = replace(plan, rows=max(rows), replica_rows=unequal, micro_batch_rows=size)
    counts = [plan.microbatches_of(replica) for replica in range(dp)]
    if workload.fine_tune.divides_weights and len(set(counts)) > 1:
        raise UserError(
            f"--replica-rows {batch.replica_rows}: replicas would have "
            f"{', '.join(map(str, counts))} micro-batches of {size}, and with --zero 3 all gather "
            "weights for each",
            f"give --micro-batch-size {max(rows)}, or leave --replica-rows out",
        )
    return plan


def rows_by_speed(total: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Divide ``total`` rows by seconds a row: each next goes where it is finished first."""
    rows = [1] * len(seconds)
    for _ in range(total - len(seconds)):
        first = min(range(len(rows)), key=lambda each: (rows[each] + 1) * seconds[each])
        rows[first] += 1
    return tuple(rows)


def _seconds_of_replicas(
    plan: Plan, workload: Workload, cluster: Cluster, length: int
) -> list[float]:
    cluster.check_speeds()
    size = plan.micro_batch_rows
    found = []
    for replica in range(plan.mesh.dp):
        models = pipeline_seconds(workload, cluster, plan.mesh, size, length, replica)
        busy = [0.0] * plan.mesh.pp
        ranges = plan.stage_map.partition.ranges
        for rank, ends in zip(plan.stage_map.placement, ranges, strict=True):
            busy[rank] += models[rank].stage(*ends).microbatch
        found.append(max(busy) / size)
    return found
