"""Find weights, gradients and losses that are not finite, on one rank.

``where`` is its name, as ``rank 1 on mac``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx

from shardmlx.engine.stage import Stage


def nonfinite_weight(
    stages: Sequence[Stage], holds: Callable[[str], bool], where: str
) -> str | None:
    """Name a weight that this rank ``holds`` and that is not finite, if there is one."""
    weights = (
        (stage, name, stage.part[name]) for stage in stages for name in filter(holds, stage.names)
    )
    return _first_nonfinite("weight", weights, where)


def nonfinite_loss(losses: Mapping[int, float], where: str) -> str | None:
    """Name a micro-batch of this rank whose loss is not finite, if there is one."""
    for j, loss in losses.items():
        if not math.isfinite(loss):
            return f"the loss of micro-batch {j} is {loss} on {where}"
    return None


def nonfinite_gradient(stages: Sequence[Stage], where: str) -> str | None:
    """Name a weight of this rank whose gradient is not finite, if there is one."""
    gradients = ((stage, *pair) for stage in stages for pair in stage.gradients.items())
    return _first_nonfinite("gradient of", gradients, where)


def _first_nonfinite(
    what: str, arrays: Iterable[tuple[Stage, str, mx.array]], where: str
) -> str | None:
    for stage, name, array in arrays:
        if not mx.isfinite(array).all().item():
            return f"the {what} {name} is not finite on {where}, stage {stage.index}"
    return None
