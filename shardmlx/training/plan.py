"""The plan of a training run: which layers and which memory each rank has. It loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from shardmlx.config.specs import RunSpec
from shardmlx.costmodel.memory_limits import PlannedMemory, check_budgets, how_to_allow_more
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.loading.rank_setup import OpenedModel, PlanInputs
from shardmlx.models.slice import Slice
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.layout import divide_batch, make_mesh, make_stage_map
from shardmlx.training.predicted import planned_memory


def make_plan(
    run: RunSpec, inputs: PlanInputs[Workload], opened: OpenedModel, model: nn.Module
) -> tuple[Plan, list[Slice]]:
    """Return the plan, and all stages' slices of ``model``: unread, so that knowing them costs
    nothing. Raises ``UserError`` where the run cannot be laid out so."""
    stage_map = _stage_map(run, inputs)
    _check_pack(run.batch.pack, opened.config)
    budgets = inputs.budgets
    mesh = make_mesh(stage_map, len(budgets), [budget.host for budget in budgets])
    rows, micro_batch_size = divide_batch(run.batch, mesh)
    slices = [Slice(model, start, stop) for start, stop in stage_map.partition.ranges]
    tune = run.fine_tune
    if tune.train and not any(part.trainable for part in slices):
        raise UserError(
            f"nothing is left to train with --fine-tune-type {tune.fine_tune_type} and "
            f"lora_parameters {dict(tune.lora_parameters)}",
            "its keys must name modules of this model; quantised weights train with lora only",
        )
    plan = Plan(
        mesh=mesh,
        stage_map=stage_map,
        schedule=run.layout.schedule,
        rows=rows,
        micro_batch_size=micro_batch_size,
        trainable=tuple(bool(part.trainable) for part in slices),
        model=opened.digest,
        pack=run.batch.pack,
    )
    return plan, slices


def _stage_map(run: RunSpec, inputs: PlanInputs[Workload]) -> StageMap:
    limit = run.machines.memory_limit
    try:
        return make_stage_map(run.model, run.layout, inputs.stage_map, inputs.sizes, inputs.cluster)
    except DoesNotFitError as error:
        if limit is None:
            raise
        way = how_to_allow_more(limit, inputs.budgets)
        raise UserError(error.fact, f"{way}lower --max-seq-length, or use more machines") from None


def _check_pack(pack: bool, model_config: Mapping[str, Any]) -> None:
    """Refuse rotary embeddings that depend on the length of the row: packed they would be
    others."""
    rope = model_config.get("rope_scaling") or model_config.get("rope_parameters") or {}
    if pack and "dynamic" in (rope.get("type"), rope.get("rope_type")):
        raise UserError(
            "--pack: the model's rotary embeddings are of type dynamic, and change with the length "
            "of the row",
            "train without --pack",
        )


def plan_memory(
    run: RunSpec, plan: Plan, inputs: PlanInputs[Workload], lengths: tuple[int, int]
) -> tuple[PlannedMemory, ...]:
    """Return what the plan expects of every rank's memory, for the longest sequences.

    ``lengths`` are those of a step, and of sequences that only pass forward. Raises ``UserError``
    where a rank has no room for it.
    """
    planned = planned_memory(plan, inputs.sizes, inputs.cluster, lengths, run.batch.grad_checkpoint)
    check_budgets(inputs.budgets, planned, _how_to_need_less(run, plan))
    return planned


def _how_to_need_less(run: RunSpec, plan: Plan) -> str:
    layout = run.layout
    ways = {
        "lower --micro-batch-size": plan.micro_batch_size > 1,
        "lower --max-seq-length": True,
        "add --grad-checkpoint": run.fine_tune.train and not run.batch.grad_checkpoint,
        "try --partitioner memory": layout.stage_map is None
        and plan.mesh.pp > 1
        and layout.partitioner != "memory",
        "give that rank fewer layers": layout.stage_map is not None and plan.mesh.pp > 1,
    }
    return ", ".join([*(way for way, is_open in ways.items() if is_open), "or use more machines"])


def headline(run: RunSpec, plan: Plan) -> str:
    """Return one line that says how the run is laid out."""
    mesh, count = plan.mesh, plan.stage_map.num_stages
    stages = f"{count} stage{'s' if count > 1 else ''}"
    return (
        f"{run.model}: {mesh.size} rank{'s' if mesh.size > 1 else ''} = {mesh.dp} data parallel x "
        f"{mesh.pp} pipeline parallel, {stages}, {plan.schedule}, batches of "
        f"{run.batch.batch_size} in {plan.microbatches} micro-batches a replica"
    )


def layers_of(plan: Plan, rank: int) -> str:
    """Return the layers of a rank's stages: ``layers 0-11 + embedding``."""
    ranges = [plan.stage_map.partition.ranges[stage] for stage in plan.stages_of(rank)]
    text = ", ".join(f"{start}-{stop - 1}" for start, stop in ranges)
    ends = []
    if ranges[0][0] == 0:
        ends.append("embedding")
    if ranges[-1][1] == plan.stage_map.partition.num_layers:
        ends.append("lm_head")
    return " + ".join([f"layers {text}", *ends])
