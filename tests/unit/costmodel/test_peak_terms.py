"""What is known of a stage for an order of actions is what ``rank_peak`` finds action by action."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from shardmlx.costmodel.memory import StageMemory, TrainingSetup, rank_peak
from shardmlx.costmodel.peak_terms import peak_of, peak_terms
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners import LayerCosts
from shardmlx.pipeline.schedules import SCHEDULES
from tests.helpers.models_and_batches import Layout, saving, tiny_config

LAYERS = 8


def setup(recomputes: bool, dp: int) -> TrainingSetup:
    return TrainingSetup(
        shape=ModelShape.from_config(tiny_config("llama", layers=LAYERS)),
        weight_sizes=LayerCosts((1.0,) * LAYERS),
        dtype_bytes=4,
        rows=1,
        length=8,
        savings=saving(recomputes),
        dp=dp,
    )


def stage_of(numbers: random.Random, **settled: Any) -> StageMemory:
    """Return a stage of random numbers, of which some are 0."""
    names = [each.name for each in fields(StageMemory)]
    drawn: dict[str, Any] = {name: numbers.choice([0, numbers.randrange(999)]) for name in names}
    return StageMemory(**{**drawn, **settled})


@pytest.mark.parametrize("has_input_gradient", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_is_that_of_rank_peak(schedule: str, has_input_gradient: bool) -> None:
    virtual = 2 if schedule in ("interleaved-1f1b", "zb-v") else 1
    plan = Layout(schedule, pp=2, virtual=virtual).plan(LAYERS, rows=6)
    numbers = random.Random(0)
    either = (False, True)
    for recomputes, is_replicated, is_trained in product(either, either, either):
        made = setup(recomputes, 1 + is_replicated)
        for rank, stage in [(r, s) for r in range(2) for s in plan.stages_of(r)]:
            own = [action for action in plan.actions[rank] if action.stage == stage]
            has = {"has_input_gradient": has_input_gradient, "is_trained": is_trained}
            terms = peak_terms(own, **has, sums_at_input=recomputes)
            assert len(terms) < len(own)
            for _ in range(10):
                memory = stage_of(numbers, **has, message=made.message)
                assert peak_of(terms, memory, made) == rank_peak(own, {stage: memory}, made)
