"""``dying_rank.py HOW COMMAND ARGUMENTS``: ``generate`` in which rank 1 fails at its fifth item, or
``evaluate`` in which it fails after its first batch. HOW is ``kill``, ``stop`` or ``raise``."""

import os
import signal
import sys
from typing import Any
from unittest.mock import patch

from shardmlx.config.commands import imported
from shardmlx.main import main

how = sys.argv.pop(1)


def failing(name: str) -> Any:
    from shardmlx.evaluation.scoring import Scorer
    from shardmlx.inference.stage import StageWorker

    start, scores = StageWorker.start, Scorer._scores
    seen = []

    def fail() -> None:
        if how != "raise":
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        raise RuntimeError("Insufficient Memory")

    def spoiled(self: StageWorker, graph: Any) -> None:
        seen.append(graph)
        if self.transport.rank == 1 and len(seen) == 5:
            fail()
        start(self, graph)

    def spoiled_scores(self: Scorer, *given: Any) -> Any:
        if self._transport.rank == 1:
            fail()
        return scores(self, *given)

    StageWorker.start = spoiled  # type: ignore[method-assign]
    Scorer._scores = spoiled_scores  # type: ignore[assignment, method-assign]
    return imported(name)


if __name__ == "__main__":
    patch("shardmlx.main.imported", failing).start()
    raise SystemExit(main(sys.argv[1:]))
