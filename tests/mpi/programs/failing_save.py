"""``failing_save.py ARGUMENTS``: ``shardmlx.train`` whose rank 1 writes its first checkpoint well,
and in the middle of the second is killed."""

import shardmlx.common.prepared

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from shardmlx.checkpoint.writer import Snapshot
from shardmlx.common.environment import launched_rank
from shardmlx.main import main

pieces = Snapshot.pieces
calls = 0


def fail(self: Snapshot) -> Any:
    global calls
    calls += 1
    first, *others = pieces(self)
    yield first
    if calls == 4:  # two files a checkpoint
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # another thread may take the signal, and this one write on until then
    yield from others


def run(arguments: Sequence[str]) -> int:
    if launched_rank() == 1:
        Snapshot.pieces = fail  # type: ignore[method-assign]
    return main(["train", *arguments])


sys.exit(run(sys.argv[1:]))
