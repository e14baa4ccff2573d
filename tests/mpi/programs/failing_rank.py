"""``failing_rank.py RANK WHEN HOW ARGUMENTS``: ``shardmlx.train`` with a rank that fails.

WHEN is ``start`` (before MPI), ``loading``, ``step`` (the second), ``scatter`` (before it adds
what others sent) or ``gather`` (before it sends what it updated). HOW is ``raise``, ``hang``,
``kill`` or ``stop``: the signals that no process can handle.
"""

import shardmlx.common.prepared

import os
import signal
import sys
import time
from typing import Any

from shardmlx.common.environment import launched_rank
from shardmlx.distributed.sums import Sums
from shardmlx.engine.stage import Stage
from shardmlx.models.slice import Slice
from shardmlx.train import main

rank, when, how, *arguments = sys.argv[1:]


def fail() -> None:
    match how:
        case "raise":
            raise RuntimeError("Insufficient Memory")
        case "hang":
            time.sleep(600)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def failing_at(call: int, method: Any) -> Any:
    """``method``, which fails when it is called for that time."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            fail()
        return method(*args, **kwargs)

    return wrapped


if launched_rank() == int(rank):
    match when:
        case "start":
            fail()
        case "loading":
            Slice.load = failing_at(1, Slice.load)  # type: ignore[method-assign]
        case "step":
            Stage.forward = failing_at(6, Stage.forward)  # type: ignore[method-assign]
        case "scatter":
            Sums._add = failing_at(1, Sums._add)  # type: ignore[method-assign]
        case "gather":
            Sums.all_gather = failing_at(3, Sums.all_gather)  # type: ignore[method-assign]
sys.exit(main(arguments))
