"""``shardmlx.generate`` in which rank 1 dies at its fifth item: argv[1] is "kill" or "raise"."""

import os
import signal
import sys
from typing import Any
from unittest.mock import patch

from shardmlx.main import main

how = sys.argv.pop(1)


def failing() -> Any:
    from shardmlx.inference.generate import run
    from shardmlx.inference.stage import StageWorker

    start = StageWorker.start
    seen = []

    def spoiled(self: StageWorker, graph: Any) -> None:
        seen.append(graph)
        if self.transport.rank == 1 and len(seen) == 5:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("Insufficient Memory")
        start(self, graph)

    StageWorker.start = spoiled  # type: ignore[method-assign]
    return run


if __name__ == "__main__":
    patch("shardmlx.main.imported", lambda name: failing()).start()
    raise SystemExit(main(["generate", *sys.argv[1:]]))
