"""``nonfinite_rank.py STEP ARGUMENTS``: ``shardmlx.train`` whose last rank has an overflow in the
gradients of one step. It leaves the process as it was."""

import shardmlx.common.prepared

import sys

import mlx.core as mx

from shardmlx.engine.gradient_reducer import GradientReducer
from shardmlx.train import main

norm = GradientReducer.norm
step, calls = int(sys.argv[1]), 0


def overflow(self: GradientReducer, spoiled: bool = False) -> float:
    global calls
    calls += 1
    for stage in self._stages:
        if calls == step and stage.part.is_last:
            name = stage.names[0]
            stage.gradients[name] = mx.full(stage.part[name].shape, mx.inf)
    return norm(self, spoiled)


GradientReducer.norm = overflow  # type: ignore[method-assign]
try:
    sys.exit(main(sys.argv[2:]))
finally:
    GradientReducer.norm = norm  # type: ignore[method-assign]
