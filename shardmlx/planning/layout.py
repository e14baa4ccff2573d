"""From a run's options to its stage map and micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shardmlx.config.train import TrainConfig
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

MICROBATCHES_A_RANK = 4
"""What the default micro-batch size aims at: a bubble of at most a fifth with 1F1B."""


def make_stage_map(
    config: TrainConfig, given: StageMap | None, workload: Workload, cluster: Cluster
) -> StageMap:
    """The stage map of the run: the user's, or the partitioner's for the machines there are."""
    if given is not None:
        given.check_pipeline(config.pipeline_stages, config.virtual_stages)
        given.check_model(config.model, workload.shape.num_layers)
        return given
    pp = config.pipeline_stages or cluster.size
    schedule = get_schedule(config.schedule)
    virtual = config.virtual_stages or schedule.default_virtual
    schedule.check(pp, 1, virtual)
    mesh = Mesh.for_world(cluster.size, pp)
    rows, micro_batch_size = divide_batch(config, mesh)
    way = Candidate(mesh, config.schedule, virtual, rows, micro_batch_size, config.grad_checkpoint)
    length = min(config.max_seq_length, TYPICAL_LENGTH)
    problem = make_problem(way, workload, cluster, length, longest=config.max_seq_length)
    return get_partitioner(config.partitioner)(problem)


def make_mesh(stage_map: StageMap, world_size: int, hosts: Sequence[str]) -> Mesh:
    """The mesh of the world's ranks; they must be on the hosts that the map names."""
    if world_size % stage_map.pp:
        raise UserError(
            f"{stage_map} needs {stage_map.pp} ranks, or a multiple of it for data parallelism, "
            f"and there are {world_size}: start mpirun with -n {stage_map.pp}"
        )
    mesh = Mesh.for_world(world_size, stage_map.pp)
    for pipeline_rank in range(mesh.pp):
        wanted = stage_map.host_of(pipeline_rank)
        rank = mesh.rank(0, pipeline_rank)
        if wanted is not None and not same_host(wanted, hosts[rank]):
            raise UserError(
                f"{stage_map} wants rank {pipeline_rank} on host {wanted}, but it runs on "
                f"{hosts[rank]}: change the order of the hostfile, or the map"
            )
    return mesh


def divide_batch(config: TrainConfig, mesh: Mesh) -> tuple[int, int]:
    """(rows of a replica, rows of a micro-batch)."""
    if config.batch_size % mesh.dp:
        raise UserError(
            f"--batch-size {config.batch_size} cannot be divided among {mesh.dp} replicas: "
            f"use a multiple of {mesh.dp}"
        )
    rows = config.batch_size // mesh.dp
    if config.micro_batch_size is None:
        size = rows if mesh.pp == 1 else max(1, rows // (MICROBATCHES_A_RANK * mesh.pp))
        return rows, size
    if config.micro_batch_size > rows:
        raise UserError(
            f"--micro-batch-size {config.micro_batch_size} is more than the {rows} rows that each "
            f"of {mesh.dp} replicas has of --batch-size {config.batch_size}: use at most {rows}"
        )
    return rows, config.micro_batch_size
