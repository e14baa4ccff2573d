"""Engines on ranks, their steps, and the run of one process with which these must agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import mlx.nn as nn
import numpy as np

from shardmlx.config.specs import FULL, NO_SAVINGS, NONE, Savings
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import Batch, pack, split
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.engine import Engine
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.objectives import Objective
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.plan import Plan
from shardmlx.training.scores import scores_of
from tests.helpers.models_and_batches import (
    Gradients,
    Result,
    largest_difference,
    reference,
    through_stages,
)

NOTHING, OPTIMIZER, WEIGHTS = range(3)
"""What replicas divide."""


def engine_of(
    transport: Transport,
    plan: Plan,
    model: nn.Module,
    divided: int = NOTHING,
    *,
    savings: Savings = NO_SAVINGS,
    objective: Objective | None = None,
    **how: Any,
) -> Engine:
    """Return the engine of a rank, which has this model alone."""
    slices = [Slice(model, start, stop) for start, stop in plan.stage_map.partition.ranges]
    own, weights = plan.stages_of(transport.rank), None
    if divided == WEIGHTS:
        replicas = plan.mesh.replicas_of(transport.rank % plan.mesh.pp)
        weights = DividedWeights(transport.rank, replicas, [slices[index] for index in own])
    stages = build_stages(slices, own, savings=savings, weights=weights, objective=objective)
    divides = divided != NOTHING
    return Engine(plan, transport, stages, divides_optimizer=divides, weights=weights, **how)


def train_on(
    engine: Engine, batch: Batch, micro_batch_size: int = 1, **how: Any
) -> dict[int, float]:
    """Make a step on the engine's rows of a batch; return the loss of each micro-batch."""
    mine = split(batch, engine.plan.mesh.dp, engine.replica, micro_batch_size)
    return engine.train_step(mine, scale=1 / batch.valid_tokens, **how)


def gradients_of(engine: Engine) -> Gradients:
    stages = engine.stages.values()
    return {name: np.array(array) for each in stages for name, array in each.gradients.items()}


@dataclass(frozen=True)
class Outcome:
    """Results of one step on one rank.

    ``losses`` of this rank's replica, by micro-batch, on the rank of the last stage only;
    ``gradients`` of this rank's stages; ``evaluated`` as ``losses``, from a forward-only run.
    """

    replica: int
    losses: dict[int, float]
    evaluated: dict[int, float]
    gradients: Gradients
    norm: float


def run_engine(
    transport: Transport,
    plan: Plan,
    model: nn.Module,
    batch: Batch,
    *,
    savings: Savings = NO_SAVINGS,
    objective: Objective | None = None,
) -> Outcome:
    """Make one training step of the engine on this rank, then evaluate the same batch."""
    replica, _ = plan.mesh.coordinates(transport.rank)
    engine = engine_of(transport, plan, model, savings=savings, objective=objective)
    part = batch.rows(*plan.starts[replica : replica + 2])
    if plan.pack:
        microbatches = pack(part, plan.microbatches_of(replica), plan.together)
    else:
        microbatches = split(part, 1, 0, plan.micro_batch_rows)
    count = batch.valid_tokens if objective is None else len(batch.tokens) // plan.together
    results = engine.train_step(microbatches, scale=1 / count)
    norm = engine.gradient_norm()
    gradients = gradients_of(engine)
    losses, evaluated = (
        dict(scores_of(each, microbatches, objective, "float32")[0])
        for each in (results, engine.evaluate(microbatches))
    )
    return Outcome(replica, losses, evaluated, gradients, norm)


@dataclass(frozen=True)
class Expected:
    """The run of one process that ``plan`` must agree with, on the same model and batch.

    mlx-lm's own; with pieces, which add up in another order, one stage of the same pieces.
    """

    plan: Plan
    model: nn.Module
    batch: Batch
    savings: Savings = NO_SAVINGS

    def for_plan(self, plan: Plan) -> Expected:
        """Return the same for a plan that cuts the batch into the same micro-batches."""
        cut = plan.starts, plan.micro_batch_rows
        assert cut == (self.plan.starts, self.plan.micro_batch_rows)
        other = replace(self, plan=plan)
        vars(other)["_run"] = self._run  # computed once for all of them
        return other

    @cached_property
    def _run(self) -> Result:
        microbatches = [
            each
            for ends in pairwise(self.plan.starts)
            for each in split(self.batch.rows(*ends), 1, 0, self.plan.micro_batch_rows)
        ]
        scale, pieces = 1 / self.batch.valid_tokens, self.savings
        if pieces.recompute == FULL:
            pieces = replace(pieces, recompute=NONE)
        if pieces == NO_SAVINGS:
            return reference(self.model, microbatches, scale)
        whole = [(0, len(self.model.layers))]
        return through_stages(self.model, whole, microbatches, scale=scale, savings=pieces)

    @property
    def gradients(self) -> Gradients:
        return self._run[1]

    def losses(self, replica: int) -> dict[int, float]:
        plan = self.plan
        start = sum(plan.microbatches_of(before) for before in range(replica))
        return dict(enumerate(self._run[0][start : start + plan.microbatches_of(replica)]))

    @property
    def norm(self) -> float:
        squares = (float(np.square(g, dtype=np.float64).sum()) for g in self.gradients.values())
        return float(np.sqrt(sum(squares)))


def check_outcome(outcome: Outcome, expected: Expected, rank: int) -> None:
    """Raise ``AssertionError`` unless one rank's outcome is that of one process.

    To the bit for one replica without tied embeddings, else within 1e-6, relative.
    """
    plan = expected.plan
    _, pipeline_rank = plan.mesh.coordinates(rank)
    stages = plan.stage_map.stages_of(pipeline_rank)
    has_last = plan.stage_map.num_stages - 1 in stages
    losses = expected.losses(outcome.replica) if has_last else {}
    assert outcome.losses == losses
    assert outcome.evaluated == losses
    parts = [Slice(expected.model, *plan.stage_map.partition.ranges[stage]) for stage in stages]
    assert set(outcome.gradients) == {name for part in parts for name in part.trainable}
    difference, name = largest_difference(outcome.gradients, expected.gradients)
    exact = plan.mesh.dp == 1 and not parts[0].tied
    assert difference <= (0.0 if exact else 1e-6), (name, difference)
    assert abs(outcome.norm - expected.norm) <= 1e-6 * expected.norm
