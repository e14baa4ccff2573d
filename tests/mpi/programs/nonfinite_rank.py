"""``nonfinite_rank.py UPDATE ARGUMENTS``: ``shardmlx.train`` whose last rank has an overflow in the
gradients of one update, or ``always``. It leaves the process as it was.

After ``UPDATE:kill`` rank 1 is killed in that update, where all ranks halve the scale of the loss,
and once the checkpoint of the step before is whole: it is written in the background.
"""

import shardmlx.common.prepared

import os
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx

from shardmlx.checkpoint.store import Store
from shardmlx.common.environment import launched_rank
from shardmlx.engine.gradient_reducer import GradientReducer
from shardmlx.engine.optimizer import LossScale
from shardmlx.main import main

norm = GradientReducer.norm
number, _, then = sys.argv[1].partition(":")
update, calls = 0 if number == "always" else int(number), 0


def overflow(self: GradientReducer, spoiled: bool = False) -> float:
    global calls
    calls += 1
    for stage in self._stages:
        if update in (0, calls) and stage.part.is_last:
            name = stage.names[0]
            stage.gradients[name] = mx.full(stage.part[name].shape, mx.inf)
    return norm(self, spoiled)


def killed(self: LossScale) -> bool:
    store = Store(Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1]))
    while store.steps() != [update - 1]:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    return False


GradientReducer.norm = overflow  # type: ignore[method-assign]
if then == "kill" and launched_rank() == 1:
    LossScale.overflowed = killed  # type: ignore[method-assign]
try:
    sys.exit(main(["train", *sys.argv[2:]]))
finally:
    GradientReducer.norm = norm  # type: ignore[method-assign]
