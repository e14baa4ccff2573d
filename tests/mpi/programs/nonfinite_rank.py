"""``nonfinite_rank.py UPDATE ARGUMENTS``: ``shardmlx.train`` whose last rank has an overflow in the
gradients of one update. It leaves the process as it was.
"""

import shardmlx.common.prepared

import sys

import mlx.core as mx

from shardmlx.engine.gradient_reducer import GradientReducer
from shardmlx.main import main

norm = GradientReducer.norm
update, calls = int(sys.argv[1]), 0


def overflow(self: GradientReducer, spoiled: bool = False) -> float:
    global calls
    calls += 1
    for stage in self._stages:
        if calls == update and stage.part.is_last:
            name = stage.names[0]
            stage.gradients[name] = mx.full(stage.part[name].shape, mx.inf)
    return norm(self, spoiled)


GradientReducer.norm = overflow  # type: ignore[method-assign]
try:
    sys.exit(main(["train", *sys.argv[2:]]))
finally:
    GradientReducer.norm = norm  # type: ignore[method-assign]
