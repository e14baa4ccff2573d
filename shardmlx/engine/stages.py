"""Build the stages of one rank out of a model that is cut into slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.gathered_stage import GatheredStage
from shardmlx.engine.stage import Stage
from shardmlx.models.slice import Slice
from shardmlx.pipeline.actions import Kind
from shardmlx.pipeline.lowering import gradient_kinds


def build_stages(
    slices: Sequence[Slice],
    own: Iterable[int] | None = None,
    *,
    savings: Savings = NO_SAVINGS,
    compiled: bool | None = None,
    weights: DividedWeights | None = None,
) -> list[Stage]:
    """Build the stages of one rank out of the slices of all stages.

    ``slices[s]`` is the slice of stage s, the whole model in pipeline order: a stage above a
    trained slice needs the gradient of its input. ``own`` are the stages to build, for a plan
    ``plan.stages_of(rank)``; by default all. ``savings`` and ``compiled`` are as for ``Stage``.
    Stages gather divided ``weights`` layer by layer.
    """
    gradients = gradient_kinds([bool(part.trainable) for part in slices])
    stages: list[Stage] = []
    for index in range(len(slices)) if own is None else own:
        part, needs_input_gradient = slices[index], Kind.I in gradients[index]
        if weights is None:
            stage = Stage(
                index,
                part,
                needs_input_gradient=needs_input_gradient,
                savings=savings,
                compiled=compiled,
            )
        else:
            stage = GatheredStage(
                index,
                part,
                weights,
                needs_input_gradient=needs_input_gradient,
                savings=savings,
            )
        stages.append(stage)
    return stages
