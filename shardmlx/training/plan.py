"""Plan a training run: the layers and the memory of each rank. Loads nothing."""

from __future__ import annotations

from dataclasses import replace

import mlx.nn as nn

from shardmlx.common.formatting import gibibytes, numbers_of, plural
from shardmlx.config.specs import SUM_DTYPES, RunSpec
from shardmlx.costmodel.memory_limits import (
    MemoryLimits,
    PlannedMemory,
    how_to_allow,
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
from shardmlx.planning.choice import Choice, choose
from shardmlx.planning.facts import Facts, SequenceLengths
from shardmlx.planning.suggestions import remedies
from shardmlx.planning.ways import ways


def facts_of(inputs: PlanInputs[Workload], opened: OpenedModel, lengths: SequenceLengths) -> Facts:
    """Return the facts behind a choice, for data whose rows have these lengths."""
    return Facts(
        workload=inputs.sizes,
        cluster=inputs.cluster,
        lengths=lengths,
        stage_map=inputs.stage_map,
        can_pack=packing_fault(opened.shape) is None,
    )


def check_layout(
    run: RunSpec, inputs: PlanInputs[Workload], opened: OpenedModel, model: nn.Module
) -> None:
    """Raise ``UserError`` for options that are wrong for any data, before these are read."""
    fault = packing_fault(opened.shape)
    if run.batch.pack and fault is not None:
        raise UserError(f"--pack: {fault}", "train without --pack")
    facts = facts_of(inputs, opened, SequenceLengths.unread(run.batch.max_seq_length))
    simplest = ways(run, facts)[0]
    try:
        plan = facts.plan(simplest)
    except DoesNotFitError:
        return  # another way may, once the lengths are known
    of_model(plan, simplest, opened, model)


def of_model(
    plan: Plan, run: RunSpec, opened: OpenedModel, model: nn.Module
) -> tuple[Plan, list[Slice]]:
    """Return the plan for this very model, and all stages' slices of it.

    Raises ``UserError`` if no weight is left to train.
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
    """Return why packed rows would change the loss, None if they do not."""
    if shape.has_dynamic_rope:
        return (
            "the model's rotary embeddings are of type dynamic, and change with the length of the "
            "row"
        )
    if not shape.family.takes_packed:
        return "the model's layers take a position in the row for one in the sequence"
    return None


def choose_plan(
    run: RunSpec, inputs: PlanInputs[Workload], opened: OpenedModel, lengths: SequenceLengths
) -> Choice:
    """Return the chosen way to train.

    Raises ``UserError`` if no way that the options leave open fits in the memory of all ranks.
    """
    facts = facts_of(inputs, opened, lengths)
    try:
        return choose(run, facts)
    except DoesNotFitError as error:
        budget = inputs.budgets[error.rank]
        needed = PlannedMemory(round(facts.cluster.capacity(error.rank) + error.shortage), 0)
        would_fit = remedies(run, facts) or ["use more machines, or machines with more memory"]
        raise UserError(
            overfull([budget], [needed], error.rank) or error.fact,
            f"{how_to_allow([budget], [needed])}{'; or '.join(would_fit)}",
        ) from None


def headline(run: RunSpec, plan: Plan) -> str:
    """Return the layout of the run in one line."""
    mesh, stages = plan.mesh, plural(plan.stage_map.num_stages, "stage")
    return (
        f"{run.model}: {plural(mesh.size, 'rank')} = {mesh.dp} data parallel x "
        f"{mesh.pp} pipeline parallel, {stages}, {plan.schedule}, batches of "
        f"{run.batch.batch_size} in {plan.microbatches} micro-batches a replica{_rows_of(plan)}"
    )


def without_effect(run: RunSpec, plan: Plan) -> list[str]:
    """Return a line for each option of replicas or stages that has no effect with one of them."""
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
    """Return the rows of each replica, if they differ."""
    if not plan.replica_rows:
        return ""
    return f" at most, rows {' + '.join(map(str, plan.replica_rows))}"


PLANNED = ("planned peak", "limit", "which is")
"""The heads of ``planned_columns``."""


def planned_columns(limits: MemoryLimits) -> tuple[str, ...]:
    """Return the planned bytes of a rank's process, its limit, and the reason for the limit."""
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
