"""``nonfinite_rank.py STEP ARGUMENTS``: ``shardmlx.train`` whose last rank has an overflow in the
gradients of one step. It leaves the process as it was.

After ``STEP:kill`` rank 1 is killed in that step, where all ranks halve the scale of the loss.
"""

import shardmlx.common.prepared

import os
import signal
import sys

import mlx.core as mx

from shardmlx.common.environment import launched_rank
from shardmlx.engine.gradient_reducer import GradientReducer
from shardmlx.engine.loss_scale import LossScale
from shardmlx.train import main

norm = GradientReducer.norm
number, _, then = sys.argv[1].partition(":")
step, calls = int(number), 0


def overflow(self: GradientReducer, spoiled: bool = False) -> float:
    global calls
    calls += 1
    for stage in self._stages:
        if calls == step and stage.part.is_last:
            name = stage.names[0]
            stage.gradients[name] = mx.full(stage.part[name].shape, mx.inf)
    return norm(self, spoiled)


def killed(self: LossScale) -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return False


GradientReducer.norm = overflow  # type: ignore[method-assign]
if then == "kill" and launched_rank() == 1:
    LossScale.overflowed = killed  # type: ignore[method-assign]
try:
    sys.exit(main(sys.argv[2:]))
finally:
    GradientReducer.norm = norm  # type: ignore[method-assign]
