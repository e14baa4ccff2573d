"""Run ``shardmlx.train``, and rest after each report until the next turn.

    _train.py ARGUMENTS, with --metrics-file

Rank 0 answers what the report says in that file, and at the end the
summary; other ranks answer nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from _training import events_of
from _turns import Turns

from shardmlx.common.environment import launched_rank
from shardmlx.config.train import LINE
from shardmlx.distributed.run_ranks import run_ranks


def main() -> int:
    turns = Turns(launched_rank())
    arguments = sys.argv[1:]
    metrics = Path(LINE.load(arguments).metrics_file or "")

    def last(name: str) -> Any:
        if launched_rank() != 0:
            return None
        return [event for event in events_of(metrics) if event["event"] == name][-1]

    def load() -> Callable[..., None]:
        from shardmlx.training import command, trainer
        from shardmlx.training.report import TrainingReport

        class RestingReport(TrainingReport):
            def step(self, *given: Any) -> None:
                super().step(*given)
                turns.answer(last("train"))
                turns.rest()

        patch.object(trainer, "TrainingReport", RestingReport).start()
        return command.run

    status = run_ranks(lambda rank: LINE.load(arguments, rank), lambda config: config.timeout, load)
    if status == 0:
        turns.answer(last("summary"))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
