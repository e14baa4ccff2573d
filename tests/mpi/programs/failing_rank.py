"""``failing_rank.py RANK WHEN HOW ARGUMENTS``: ``shardmlx.train`` with a rank that fails.

WHEN is ``start`` (before MPI), ``loading``, ``step`` (the second), ``scatter`` (before it adds
what others sent), ``gather`` (before it sends what it updated) or ``gathering`` (when it has sent
that, and others are still to send); ``scatter:5`` is in step 5. It may be a command of rank 0,
like ``shardmlx.training.worker.TrainWorker.load``, at which the rank then fails. HOW is ``raise``,
``hang``, ``kill`` or ``stop``: the signals that no process can handle. A file at ``$LOST``, if that
is set, then has the time.
"""

import shardmlx.common.prepared

import os
import pkgutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shardmlx.common.environment import launched_rank
from shardmlx.distributed.sums import Sums
from shardmlx.engine.stage import Stage
from shardmlx.main import main
from shardmlx.models.runtime.slice import Slice
from shardmlx.training.losses import Gradients
from tests.helpers.commands import failing_at as failing_at_command

rank, when, how, *arguments = sys.argv[1:]
when, _, first = when.partition(":")
began = 0
"""The step that is under way."""


def fail() -> None:
    if lost := os.environ.get("LOST"):
        Path(lost).touch()
    match how:
        case "raise":
            raise RuntimeError("Insufficient Memory")
        case "hang":
            time.sleep(600)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def counting(method: Any) -> Any:
    def wrapped(gradients: Gradients, step: int, *given: Any) -> Any:
        global began
        began = step
        return method(gradients, step, *given)

    return wrapped


def failing_at(call: int, method: Any) -> Any:
    """``method``, which fails when it is called for that time, from the ``first`` step on."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += began >= int(first or 0)
        if calls == call:
            fail()
        return method(*args, **kwargs)

    return wrapped


if launched_rank() == int(rank):
    Gradients.begin = counting(Gradients.begin)  # type: ignore[method-assign]
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
        case "gathering":
            Sums._finish = failing_at(3, Sums._finish)  # type: ignore[method-assign]
with ExitStack() as stack:
    if "." in when and launched_rank() == int(rank):
        command: Any = pkgutil.resolve_name(when)
        stack.enter_context(failing_at_command(command.__code__, fail))
    sys.exit(main(["train", *arguments]))
