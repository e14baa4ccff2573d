"""``slow_rank.py CALLS ARGUMENTS``: ``shardmlx.train`` whose rank 1 takes three times as long, and
50 ms more (on a busy machine longer), for each forward after that many. It leaves the process as it
was."""

import shardmlx.common.prepared

import sys
import time
from typing import Any

from shardmlx.common.environment import launched_rank
from shardmlx.engine.stage import Stage
from shardmlx.main import main
from testbed.jobs import patience

usual, forward = int(sys.argv[1]), Stage.forward
calls = 0


def slow(self: Stage, *args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    start = time.monotonic()
    out = forward(self, *args, **kwargs)
    if calls > usual:
        time.sleep(patience(0.05) + 2 * (time.monotonic() - start))
    return out


if launched_rank() == 1:
    Stage.forward = slow  # type: ignore[method-assign]
try:
    sys.exit(main(["train", *sys.argv[2:]]))
finally:
    Stage.forward = forward  # type: ignore[method-assign]
