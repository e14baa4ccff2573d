"""``slow_rank.py ARGUMENTS``: ``shardmlx.train`` whose rank 1 takes three times as long for each
forward from its 41st on."""

import shardmlx.common.prepared

import sys
import time
from typing import Any

from shardmlx.common.environment import launched_rank
from shardmlx.engine.stage import Stage
from shardmlx.train import main

forward = Stage.forward
calls = 0


def slow(self: Stage, *args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    start = time.monotonic()
    out = forward(self, *args, **kwargs)
    if calls > 40:
        time.sleep(0.05 + 2 * (time.monotonic() - start))
    return out


if launched_rank() == 1:
    Stage.forward = slow  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
