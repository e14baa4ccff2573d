"""``failing_rank.py HOW ARGUMENTS``: ``shardmlx.train`` whose rank 1 fails in its sixth forward:
it raises, or hangs."""

import sys
import time
from typing import Any

from shardmlx.environment import launched_rank, prepare

prepare()

from shardmlx.stage import Stage  # noqa: E402
from shardmlx.train import main  # noqa: E402

how, *arguments = sys.argv[1:]
forward = Stage.forward
calls = 0


def fail(self: Stage, *args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    if calls == 6 and how == "raise":
        raise RuntimeError("Insufficient Memory")
    if calls == 6 and how == "hang":
        time.sleep(600)
    return forward(self, *args, **kwargs)


if launched_rank() == 1:
    Stage.forward = fail  # type: ignore[method-assign]
sys.exit(main(arguments))
