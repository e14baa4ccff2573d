"""The plan of a training run: which layers and which memory each rank has. It loads nothing."""

from __future__ import annotations

from dataclasses import replace

import mlx.nn as nn

from shardmlx.common.formatting import gibibytes, numbers_of, plural
from shardmlx.config.specs import DIVIDED_WEIGHTS, RECOMPUTE, SUM_DTYPES, RunSpec
from shardmlx.costmodel.memory_limits import (
    MemoryLimits,
    PlannedMemory,
    how_to_allow,
    how_to_allow_more,
    overfull,
)
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.loading.build import cut
from shardmlx.loading.rank_setup import OpenedModel, PlanInputs
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.layout import settled
from shardmlx.planning.suggestions import remedies
from shardmlx.training.choice import Choice, Circumstances, SequenceLengths, choose, lay_out
from shardmlx.training.predicted import planned_memory


def make_plan(
    run: RunSpec, inputs: PlanInputs[Workload], opened: OpenedModel, model: nn.Module
) -> tuple[Plan, list[Slice]]:
    """Return the plan, and all stages' slices of ``model``: unread, so that knowing them costs
    nothing. Raises ``UserError`` where the run cannot be laid out so."""
    fault = packing_fault(opened.shape)
    if run.batch.pack and fault is not None:
        raise UserError(f"--pack: {fault}", "train without --pack")
    try:
        plan = lay_out(run, inputs.sizes, inputs.stage_map, inputs.cluster)
    except DoesNotFitError as error:
        way = how_to_allow_more(run.machines.memory_limit, inputs.budgets)
        ways = what_would_fit(run, inputs, run.batch.max_seq_length - 1)
        raise UserError(error.fact, f"{way}{ways}") from None
    return of_model(plan, run, opened, model)


def of_model(
    plan: Plan, run: RunSpec, opened: OpenedModel, model: nn.Module
) -> tuple[Plan, list[Slice]]:
    """Return the plan for this very model, and all stages' slices of it.

    Raises ``UserError`` where nothing of it is left to train.
    """
    slices = cut(model, plan.stage_map.partition.ranges)
    tune = run.fine_tune
    if tune.train and not any(part.trainable for part in slices):
        raise UserError(
            f"nothing is left to train with --fine-tune-type {tune.fine_tune_type} and "
            f"lora_parameters {dict(tune.lora_parameters)}",
            "its keys must name modules of this model; quantised weights train with lora only",
        )
    trainable = tuple(bool(part.trainable) for part in slices)
    return replace(plan, trainable=trainable, model=opened.digest), slices


def packing_fault(shape: ModelShape) -> str | None:
    """Return why packed rows would not have the same loss, None where they have."""
    if shape.has_dynamic_rope:
        return (
            "the model's rotary embeddings are of type dynamic, and change with the length of the "
            "row"
        )
    if not shape.family.takes_packed:
        return "the model's layers take a position in the row for one in the sequence"
    return None


def choose_plan(
    run: RunSpec,
    inputs: PlanInputs[Workload],
    opened: OpenedModel,
    model: nn.Module,
    lengths: SequenceLengths,
) -> Choice:
    """Return the way to train that is taken.

    Raises ``UserError`` where no way that the options leave open fits in the memory of all ranks.
    """
    facts = Circumstances(
        sizes=inputs.sizes,
        given=inputs.stage_map,
        cluster=inputs.cluster,
        budgets=inputs.budgets,
        lengths=lengths,
        can_pack=packing_fault(opened.shape) is None,
    )
    choice = choose(run, facts)
    if choice is None:
        # The way that needs the least, of those that are left open.
        recompute, rows = run.batch.recompute or RECOMPUTE[-1], run.batch.micro_batch_size or 1
        least = replace(run.batch, recompute=recompute, micro_batch_size=rows)
        tune = run.fine_tune
        if tune.zero is None:
            tune = replace(tune, zero=DIVIDED_WEIGHTS)
        tightest = replace(run, batch=least, fine_tune=tune).first
        plan, _ = make_plan(tightest, inputs, opened, model)
        planned = memory_of(tightest, plan, inputs, lengths)
        allowed = how_to_allow(inputs.budgets, planned)
        raise UserError(
            overfull(inputs.budgets, planned) or "the model does not fit",
            f"{allowed}{what_would_fit(run, inputs, lengths.longest[0])}",
        )
    return choice


def memory_of(
    run: RunSpec, plan: Plan, inputs: PlanInputs[Workload], lengths: SequenceLengths
) -> tuple[PlannedMemory, ...]:
    """Return what the plan expects of every rank's memory, for the longest sequences."""
    workload = replace(inputs.sizes, batch=run.batch, fine_tune=run.fine_tune)
    recompute = run.batch.recomputed
    return planned_memory(plan, workload, inputs.cluster, lengths.longest, recompute)


def what_would_fit(run: RunSpec, inputs: PlanInputs[Workload], length: int) -> str:
    """Return the changes of which each was found to make the run fit, with sequences of
    ``length``."""
    given, size = inputs.stage_map, inputs.cluster.size
    pp = given.pp if given is not None else run.layout.pipeline_stages or size
    limits = replace(
        settled(run.layout, run.batch, run.fine_tune),
        length=max(1, length),
        data_parallel=max(1, size // pp),
        stage_map=given,
    )
    found = remedies(inputs.sizes, inputs.cluster, limits)
    return "; or ".join(found) or "use more machines, or machines with more memory"


def headline(run: RunSpec, plan: Plan) -> str:
    """Return one line that says how the run is laid out."""
    mesh, stages = plan.mesh, plural(plan.stage_map.num_stages, "stage")
    return (
        f"{run.model}: {plural(mesh.size, 'rank')} = {mesh.dp} data parallel x "
        f"{mesh.pp} pipeline parallel, {stages}, {plan.schedule}, batches of "
        f"{run.batch.batch_size} in {plan.microbatches} micro-batches a replica{_rows_of(plan)}"
    )


def without_effect(run: RunSpec, plan: Plan) -> list[str]:
    """Return a line for each option of replicas or of stages where there is one of them."""
    tune, mesh = run.fine_tune, plan.mesh
    if not tune.train:
        return []
    lines = []
    if mesh.dp == 1:
        options = [
            *([f"--zero {tune.zero}"] if tune.zero else []),
            *([f"--sum-dtype {tune.sum_dtype}"] if tune.sum_dtype != SUM_DTYPES[0] else []),
            *([f"--replica-rows {rows}"] if (rows := run.batch.replica_rows) else []),
        ]
        why = "there is one replica" + ": fewer --pipeline-stages make more" * (mesh.pp > 1)
        lines += [f"{option} has no effect: {why}" for option in options]
    return lines


def _rows_of(plan: Plan) -> str:
    """Return the rows of each replica, where they differ."""
    if not plan.replica_rows:
        return ""
    return f" at most, rows {' + '.join(map(str, plan.replica_rows))}"


PLANNED = ("planned peak", "limit", "which is")
"""The heads of ``planned_columns``."""


def planned_columns(limits: MemoryLimits) -> tuple[str, ...]:
    """Return what a rank's process is planned to take, what it may take, and why no more."""
    return gibibytes(limits.planned_process), gibibytes(limits.process), limits.reasons[0]


def layers_of(plan: Plan, rank: int) -> str:
    """Return the layers of a rank's stages: ``layers 0-11 + embedding``."""
    ranges = [plan.stage_map.partition.ranges[stage] for stage in plan.stages_of(rank)]
    text = ", ".join(numbers_of(*layers) for layers in ranges)
    ends = []
    if ranges[0][0] == 0:
        ends.append("embedding")
    if ranges[-1][1] == plan.stage_map.partition.num_layers:
        ends.append("lm_head")
    return " + ".join([f"layers {text}", *ends])
