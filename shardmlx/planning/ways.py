"""Answer the open options of a run, in every way that makes sense. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from shardmlx.config.common_options import AUTO, FASTEST, SIMPLEST, SMALLEST
from shardmlx.config.objective import SFT
from shardmlx.config.specs import COUNTED, DIVIDED_WEIGHTS, RECOMPUTE, RunSpec
from shardmlx.errors import UserError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import suits
from shardmlx.pipeline.schedules import SCHEDULES, get_schedule
from shardmlx.planning.facts.plan_facts import PlanFacts
from shardmlx.planning.layout import divide_batch, make_mesh


def ways(run: RunSpec, facts: PlanFacts) -> list[RunSpec]:
    """Return all answers to the open options, the simplest first; ``UserError`` without any."""
    run = run.for_ranks(facts.cluster.size)
    meshes = _meshes(run, facts)
    found = [way for mesh in meshes for way in _of_mesh(run, facts, mesh)]
    if not found:
        raise _nothing_left(run, facts, meshes)
    cluster = facts.cluster
    is_timed = cluster.unit == "seconds" and cluster.knows_messages
    if not is_timed or not run.fine_tune.train:
        # The longest pipeline, with the smallest ranks and the fewest messages.
        longest = max(each.layout.pipeline_stages or 1 for each in found)
        found = [each for each in found if each.layout.pipeline_stages == longest]
    return sorted(found, key=complexity)


def size_of(way: RunSpec) -> int | None:
    """Return the rows of a micro-batch; None where these are all rows of a replica."""
    return way.batch.micro_batch_size


def with_smallest(run: RunSpec) -> RunSpec | None:
    """Return the run with the smallest micro-batches; None unless it asks for larger ones."""
    least = run.loss.together
    if (size_of(run) or least) == least:
        return None
    return replace(run, batch=replace(run.batch, micro_batch_size=least))


def complexity(way: RunSpec) -> tuple[bool, int, int, bool, bool]:
    """Return a sort key: little recomputing and few messages first, and long pipelines."""
    batch = way.batch
    stages = way.layout.pipeline_stages or 1
    again = RECOMPUTE.index(batch.recomputed)
    counted = batch.loss_chunk == COUNTED
    return way.fine_tune.divides_weights, again, -stages, counted, bool(batch.pack)


def _meshes(run: RunSpec, facts: PlanFacts) -> list[Mesh]:
    """Return the meshes that the options leave open, the longest pipeline first."""
    size = facts.cluster.size
    cluster = facts.cluster
    if facts.stage_map is not None:
        facts.stage_map.check_pipeline(run.layout.pipeline_stages)
        facts.stage_map.check_model(run.model, facts.workload.shape.num_layers)
        return [make_mesh(facts.stage_map, size, [each.host for each in cluster.machines])]
    if run.layout.pipeline_stages is not None:
        return [Mesh.for_world(size, run.layout.pipeline_stages)]
    return [Mesh(size // pp, pp) for pp in range(size, 0, -1) if size % pp == 0]


def _of_mesh(run: RunSpec, facts: PlanFacts, mesh: Mesh) -> Iterator[RunSpec]:
    tune = run.fine_tune
    batch = run.batch
    layout = run.layout
    try:
        rows, usual = divide_batch(run, mesh)
    except UserError:
        if layout.pipeline_stages is not None or facts.stage_map is not None:
            raise
        return
    tunes = [tune]
    if tune.train and tune.zero is None and mesh.dp > 1:
        usual_zero = int(tune.divides_optimizer)
        tunes = [replace(tune, zero=zero) for zero in (usual_zero, DIVIDED_WEIGHTS)]
    can_pack = facts.workload.shape.takes_packed and not facts.lengths.are_alike
    packs = ((False, True) if can_pack else (False,)) if batch.pack is None else (batch.pack,)
    amounts = RECOMPUTE if batch.recompute is None else (batch.recompute,)
    for schedule, pack in product(_schedules(run, facts, mesh.pp), packs):
        virtual = virtual_of(schedule, facts)
        chunks = [batch.loss_chunk]
        if run.loss.objective != SFT:
            chunks = [COUNTED]  # answers alone count
        elif batch.loss_chunk == AUTO and facts.lengths.counted_share(pack) < 1:
            chunks = [AUTO, COUNTED]
        for size in _sizes(run, facts, rows, usual, mesh.pp, pack):
            if not _runs(schedule, mesh.pp, -(-rows // (size or usual)), virtual, facts):
                continue
            answers = product(tunes, amounts, chunks, _partitioners(run, facts, virtual))
            for each, amount, chunk, partitioner in answers:
                yield replace(
                    run,
                    fine_tune=each,
                    layout=replace(
                        layout, pipeline_stages=mesh.pp, partitioner=partitioner, schedule=schedule
                    ),
                    batch=replace(
                        batch, micro_batch_size=size, pack=pack, recompute=amount, loss_chunk=chunk
                    ),
                )


def _schedules(run: RunSpec, facts: PlanFacts, pp: int) -> list[str]:
    """Return the schedules that a prediction can compare, from the simplest on."""
    # 1F1B takes as long as GPipe, and never more memory.
    names = [SIMPLEST, *(name for name in SCHEDULES if name not in (SIMPLEST, "gpipe"))]
    if run.layout.schedule != AUTO:
        names = [run.layout.schedule]
    if facts.stage_map is not None:
        return [name for name in names if suits(facts.stage_map, get_schedule(name))]
    if run.layout.schedule == AUTO and (pp == 1 or not facts.cluster.knows_messages):
        return [SIMPLEST]  # one rank needs no order; this one has the fewest messages
    return names


def virtual_of(schedule: str, facts: PlanFacts) -> int:
    """Return how many stages each rank has: the stage map's, or those that a schedule asks for."""
    if facts.stage_map is not None:
        return facts.stage_map.virtual
    return get_schedule(schedule).default_virtual


def _runs(schedule: str, pp: int, microbatches: int, virtual: int, facts: PlanFacts) -> bool:
    """Return whether a schedule can run so many micro-batches, and has a layer for each stage."""
    try:
        get_schedule(schedule).check(pp, microbatches, virtual)
    except UserError:
        return False
    return pp * virtual <= facts.workload.shape.num_layers


def _sizes(
    run: RunSpec, facts: PlanFacts, rows: int, usual: int, pp: int, pack: bool
) -> Sequence[int | None]:
    """Return sizes of micro-batches: the usual one, larger ones that leave each rank one, smaller
    ones; None stands for all rows of a replica while their number is unknown."""
    batch = run.batch
    if batch.micro_batch_size is not None:
        return [batch.micro_batch_size]
    together = run.loss.together
    # Without packing, larger ones may be padded by an unknown amount.
    grows = pack or facts.lengths.are_alike
    larger = [usual << k for k in range(1, rows.bit_length())] if grows else []
    smaller = [usual >> k for k in range(1, usual.bit_length()) if (usual >> k) % together == 0]
    first = None if usual == rows and batch.replica_rows is not None else usual
    return [first, *(size for size in larger if rows // size >= pp), *smaller]


def _partitioners(run: RunSpec, facts: PlanFacts, virtual: int) -> tuple[str, ...]:
    """Return the partitioners to try, the fastest division first; ``hetero`` knows memory too."""
    if run.layout.partitioner != AUTO:
        return (run.layout.partitioner,)
    if virtual == 1 and facts.stage_map is None and facts.beside is None:
        return ("hetero",)
    knows_memory = all(math.isfinite(facts.cluster.capacity(i)) for i in range(facts.cluster.size))
    return (FASTEST, SMALLEST) if knows_memory and facts.stage_map is None else (FASTEST,)


def _nothing_left(run: RunSpec, facts: PlanFacts, meshes: list[Mesh]) -> UserError:
    layers = facts.workload.shape.num_layers
    names = _schedules(run, facts, meshes[0].pp)
    if not names:
        asked = "" if run.layout.schedule == AUTO else f" {run.layout.schedule}"
        return UserError(
            f"{facts.stage_map} suits no schedule{asked} on {facts.cluster.size} ranks",
            "number its ranks as the schedule does, or leave the map out",
        )
    errors = []
    for mesh, name in product(meshes, names):
        virtual = virtual_of(name, facts)
        try:
            rows, size = divide_batch(run, mesh)
            get_schedule(name).check(mesh.pp, -(-rows // size), virtual)
        except UserError as error:
            errors.append(error)
            continue
        return UserError(
            f"{mesh.pp * virtual} stages, but the model has {layers} layers",
            f"use at most {layers}, or replicas: --data-parallel",
        )
    return errors[0]
