"""A run's stage map and micro-batches, from its options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence

from shardmlx.config.common_options import AUTO
from shardmlx.config.specs import BatchOptions, FineTune, LayoutOptions
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import same_host
from shardmlx.costmodel.timing import TYPICAL_LENGTH
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.partitioners import get_partitioner
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.partition_problem import Candidate, make_problem
from shardmlx.planning.search import Limits

MICROBATCHES_A_RANK = 4
"""The aim of the default micro-batch size: a bubble of at most a fifth with 1F1B."""


def make_stage_map(
    model: str,
    layout: LayoutOptions,
    given: StageMap | None,
    workload: Workload,
    cluster: Cluster,
) -> StageMap:
    """Return the stage map of the run: the ``given`` one, which is the user's, or the
    partitioner's for the machines there are.

    Raises ``UserError`` where the given one is for another ``model`` or pipeline, and
    ``DoesNotFitError`` where the partitioner finds no room.
    """
    if given is not None:
        given.check_pipeline(layout.pipeline_stages, layout.virtual_stages)
        given.check_model(model, workload.shape.num_layers)
        return given
    batch = workload.batch
    layout, batch = layout.first, batch.first
    pp = layout.pipeline_stages or cluster.size
    schedule = get_schedule(layout.schedule)
    virtual = layout.virtual_stages or schedule.default_virtual
    schedule.check(pp, 1, virtual)
    mesh = Mesh.for_world(cluster.size, pp)
    rows, micro_batch_size = divide_batch(batch, mesh)
    way = Candidate(mesh, layout.schedule, virtual, rows, micro_batch_size, batch.recomputed)
    length = min(batch.max_seq_length, TYPICAL_LENGTH)
    problem = make_problem(way, workload, cluster, length, longest=batch.max_seq_length)
    return get_partitioner(layout.partitioner)(problem)


def settled(layout: LayoutOptions, batch: BatchOptions, fine_tune: FineTune) -> Limits:
    """Return what the planner must leave as it is: what the options do not leave to the run."""
    return Limits(
        batch_size=batch.batch_size,
        length=batch.max_seq_length,
        schedule=None if layout.schedule == AUTO else layout.schedule,
        virtual=layout.virtual_stages,
        micro_batch_size=batch.micro_batch_size,
        recompute=batch.recompute,
        partitioner=None if layout.partitioner == AUTO else layout.partitioner,
        replica_rows=batch.replica_rows,
        divides_weights=None if fine_tune.zero is None else fine_tune.divides_weights,
    )


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


def divide_batch(batch: BatchOptions, mesh: Mesh) -> tuple[int, int]:
    """Return (rows of a replica, rows of a micro-batch); ``UserError`` where they do not divide.

    Where replicas have unequal rows, those of the one with the most that is given, or the mean.
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
    """Return the rows of a micro-batch where no option says them, of a replica's rows."""
    return rows if pp == 1 else max(1, rows // (MICROBATCHES_A_RANK * pp))


def _check_given(batch: BatchOptions, replicas: int) -> None:
    rows = batch.given_rows
    if len(rows) != replicas or sum(rows) != batch.batch_size:
        raise UserError(
            f"--replica-rows {batch.replica_rows} are {sum(rows)} rows of {len(rows)} replicas, "
            f"and there are {replicas} for --batch-size {batch.batch_size}",
            "give the rows of each replica, or auto",
        )
