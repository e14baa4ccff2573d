"""A run's stage map, micro-batches and rows of replicas, from its options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardmlx.config.specs import BatchOptions, RunSpec
from shardmlx.costmodel.cluster import Cluster, pipeline_seconds
from shardmlx.costmodel.hostfile import Machine, same_host
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts, Problem, get_partitioner, uniform
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.partition_problem import make_problem, trainable_stages

MICROBATCHES_A_RANK = 4
"""Micro-batches for each rank, so that 1F1B's bubble is at most a fifth."""


def lay_out(
    way: RunSpec,
    workload: Workload,
    given: StageMap | None,
    cluster: Cluster,
    length: int,
    longest: int,
) -> Plan:
    """Return the plan of a run without open options; ``given`` is the user's stage map.

    Layers are divided for rows of ``length`` tokens, with room for the ``longest``. Raises
    ``DoesNotFitError`` if the partitioner finds no room, another ``UserError`` if the run cannot be
    laid out.
    """
    layout = way.layout
    mesh = Mesh.for_world(cluster.size, layout.pipeline_stages or cluster.size)
    rows, size = divide_batch(way.batch, mesh)
    stage_map = given or _evenly(layout.schedule, mesh.pp, workload.shape.num_layers)
    plan = Plan(
        mesh=mesh,
        stage_map=stage_map,
        schedule=layout.schedule,
        rows=rows,
        micro_batch_size=size,
        trainable=(True,) * stage_map.num_stages,
        pack=bool(workload.batch.pack),
    )
    if given is None:
        problem = make_problem(plan, workload, cluster, length, longest)
        stage_map = get_partitioner(layout.partitioner)(problem)
    plan = replace(plan, stage_map=stage_map, trainable=trainable_stages(workload, stage_map))
    return with_replica_rows(plan, workload, cluster, length)


def _evenly(schedule: str, pp: int, num_layers: int) -> StageMap:
    """Return the stages of a schedule with about equal numbers of layers."""
    chosen = get_schedule(schedule)
    placement = chosen.placement(pp, chosen.default_virtual)
    return uniform(Problem.homogeneous(LayerCosts((1.0,) * num_layers), placement))


def make_mesh(stage_map: StageMap, world_size: int, hosts: Sequence[str]) -> Mesh:
    """Return the mesh of the world's ranks.

    Raises ``UserError`` unless they are on the hosts that the map names.
    """
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


def divide_by_speed(
    partitioner: str,
    machines: Sequence[Machine],
    *,
    costs: LayerCosts,
    sizes: LayerCosts,
    peak: Callable[[int, int, int], float],
    capacity: Sequence[float],
    num_stages: int,
) -> StageMap:
    """Divide a forward pass, one stage a rank; ``costs`` are FLOPs.

    Speeds of machines count if all are known. Raises ``DoesNotFitError`` if nothing fits.
    """
    speeds = [machine.flops for machine in machines if machine.flops is not None]
    is_timed = len(speeds) == num_stages
    problem = Problem(
        placement=tuple(range(num_stages)),
        costs=tuple(costs.scaled(1 / speed) for speed in speeds)
        if is_timed
        else (costs,) * num_stages,
        sizes=sizes,
        peak=peak,
        capacity=tuple(capacity),
        hosts=tuple(machine.host for machine in machines),
    )
    return get_partitioner(partitioner)(problem)


def divide_batch(batch: BatchOptions, mesh: Mesh) -> tuple[int, int]:
    """Return (rows of a replica, rows of a micro-batch); ``UserError`` if they do not divide.

    If replicas have unequal rows, the rows are the most that one is given, or the mean.
    """
    rows = -(-batch.batch_size // mesh.dp)
    if mesh.dp > 1 and batch.given_rows:
        _check_given(batch, mesh.dp)
        rows = max(batch.given_rows)
    elif batch.batch_size % mesh.dp and batch.replica_rows is None:
        raise UserError(
            f"--batch-size {batch.batch_size} cannot be divided among {mesh.dp} replicas",
            f"use a multiple of {mesh.dp}, or --replica-rows auto",
        )
    elif batch.batch_size < mesh.dp:
        raise UserError(
            f"--batch-size {batch.batch_size} leaves some of {mesh.dp} replicas without a row",
            f"use {mesh.dp} or more",
        )
    if batch.micro_batch_size is None:
        return rows, usual_size(rows, mesh.pp)
    if batch.micro_batch_size > rows:
        raise UserError(
            f"--micro-batch-size {batch.micro_batch_size} is more than the {rows} rows that each "
            f"of {mesh.dp} replicas has of --batch-size {batch.batch_size}",
            f"use at most {rows}",
        )
    return rows, batch.micro_batch_size


def usual_size(rows: int, pp: int) -> int:
    """Return the default rows of a micro-batch, for a replica's rows."""
    return rows if pp == 1 else max(1, rows // (MICROBATCHES_A_RANK * pp))


def _check_given(batch: BatchOptions, replicas: int) -> None:
    rows = batch.given_rows
    if len(rows) != replicas or sum(rows) != batch.batch_size:
        raise UserError(
            f"--replica-rows {batch.replica_rows} are {sum(rows)} rows of {len(rows)} replicas, "
            f"and there are {replicas} for --batch-size {batch.batch_size}",
            "give the rows of each replica, or auto",
        )


def with_replica_rows(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> Plan:
    """Return the plan with the rows of each replica that ``--replica-rows`` asks for.

    Division by speed lets the last replica finish as early as possible, with rows of ``length``
    tokens. The loss is the sum over all tokens of the batch, divided by their number: the division
    of rows changes only the order of sums. Raises ``UserError`` if a machine's speed is unknown, or
    if replicas that gather weights together would do so unequal numbers of times.
    """
    batch, dp = workload.batch, plan.mesh.dp
    if batch.replica_rows is None or dp == 1:
        return plan
    rows = batch.given_rows or rows_by_speed(
        batch.batch_size, _seconds_of_replicas(plan, workload, cluster, length)
    )
    size = plan.micro_batch_size
    if batch.micro_batch_size is None and size == plan.rows:
        size = max(rows)  # all rows of a replica are one micro-batch
    unequal = rows if len(set(rows)) > 1 else ()
    plan = replace(plan, rows=max(rows), replica_rows=unequal, micro_batch_size=size)
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
    """Divide ``total`` rows among replicas with so many seconds a row: each gets at least one, and
    each next row goes to the replica that finishes it first."""
    rows = [1] * len(seconds)
    for _ in range(total - len(seconds)):
        first = min(range(len(rows)), key=lambda each: (rows[each] + 1) * seconds[each])
        rows[first] += 1
    return tuple(rows)


def _seconds_of_replicas(
    plan: Plan, workload: Workload, cluster: Cluster, length: int
) -> list[float]:
    """Return the seconds that a row takes on the busiest rank of each replica."""
    cluster.check_speeds()
    size = plan.micro_batch_size
    found = []
    for replica in range(plan.mesh.dp):
        models = pipeline_seconds(workload, cluster, plan.mesh, size, length, replica)
        busy = [0.0] * plan.mesh.pp
        ranges = plan.stage_map.partition.ranges
        for rank, ends in zip(plan.stage_map.placement, ranges, strict=True):
            busy[rank] += models[rank].stage(*ends).microbatch
        found.append(max(busy) / size)
    return found
