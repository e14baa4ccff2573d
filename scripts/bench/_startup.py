"""Run ``shardmlx.train``, and say where the time to its first step goes, and what it reads.

    _startup.py DIRECTORY ARGUMENTS

Every rank writes DIRECTORY/rank-R.json: when each milestone was reached, in seconds since the
epoch; the seconds inside what prepares the run; bytes read while loading weights and in all of the
preparation, 0 where the system does not count them; and those of the rank's stages.
"""

from __future__ import annotations

from _began import BEGAN

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from shardmlx.common.environment import launched_rank
from shardmlx.config.train import load_config
from shardmlx.distributed.run_ranks import run_ranks

PARTS = {
    "loading.rank_setup.find_weights": "finding the model",
    "training.setup.build_model": "building it, lazily",
    "training.plan.make_stage_map": "planning",
    "training.plan.Plan": "planning",
    "training.setup.compare_plans": "comparing plans",
    "training.setup.read_tokenizer": "tokenizer and data",
    "training.setup.read_data": "tokenizer and data",
}
"""Functions that are timed, by the name under which the module that calls them knows them."""

LOADING = "loading weights"

ADAPTERS = (".lora_a", ".lora_b")
"""Ends of the names of weights that are made, not read."""


def bytes_read() -> int:
    """Return the bytes that this process has read; 0 where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(lines[0].removeprefix("rchar: "))


def main() -> int:
    directory, *arguments = sys.argv[1:]
    milestones = {"Python": BEGAN}
    seconds: dict[str, float] = {}
    loaded: dict[str, int] = {}

    def reached(name: str) -> None:
        milestones.setdefault(name, time.time())

    inside: list[str] = []

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.time()
            inside.append(name)
            try:
                return work(*args, **kwargs)
            finally:
                inside.pop()
                if not inside:  # else it counts for the one that called it
                    seconds[name] = seconds.get(name, 0.0) + time.time() - start

        return run

    def load() -> Callable[..., None]:
        reached("options")
        from shardmlx.loading.transfer import Weights
        from shardmlx.training import trainer
        from shardmlx.training.report import TrainingReport

        for path, name in PARTS.items():
            target = f"shardmlx.{path}"
            patch(target, timed(name, resolve_name(target))).start()
        read_all = timed(LOADING, Weights.load)

        def read(weights: Any, parts: Any, *given: Any) -> None:
            before = bytes_read()
            read_all(weights, parts, *given)
            loaded["read"] = bytes_read() - before
            loaded["stages"] = sum(
                array.nbytes
                for part in parts
                for name, array in part.parameters().items()
                if not name.endswith(ADAPTERS)
            )

        class Report(TrainingReport):
            def step(self, *given: Any) -> None:
                reached("first step" if "first step" not in milestones else "second step")
                super().step(*given)

        prepare_training = trainer.prepare_training

        def prepare(*given: Any) -> Any:
            before = bytes_read()
            job = prepare_training(*given)
            loaded["preparing"] = bytes_read() - before
            reached("prepared")
            return job

        patch.object(Weights, "load", read).start()
        patch.object(trainer, "TrainingReport", Report).start()
        patch.object(trainer, "prepare_training", prepare).start()
        reached("imports")

        def run(*given: Any) -> None:
            reached("MPI")
            trainer.run(*given)

        return run

    status = run_ranks(
        lambda rank: load_config(arguments, rank), lambda config: config.timeout, load
    )
    report = {"milestones": milestones, "seconds": seconds, "loaded": loaded}
    Path(directory, f"rank-{launched_rank()}.json").write_text(json.dumps(report))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
