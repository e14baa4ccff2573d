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
from shardmlx.config.train import LINE
from shardmlx.distributed.run_ranks import run_ranks

PARTS = {
    "loading.rank_setup.find_weights": "finding the model",
    "training.planned_run.build_model": "building it, lazily",
    "training.planned_run._check_layout": "planning",
    "training.planned_run.choose_plan": "planning",
    "training.planned_run._of_model": "planning",
    "training.planned_run.compare_plans": "comparing plans",
    "training.planned_run.read_tokenizer": "tokenizer and data",
    "training.planned_run.read_data": "tokenizer and data",
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


class Observed:
    """What is seen of a run: milestones, seconds inside functions, bytes read."""

    def __init__(self) -> None:
        self.milestones = {"Python": BEGAN}
        self.seconds: dict[str, float] = {}
        self.loaded: dict[str, int] = {}
        self._inside: list[str] = []

    def reached(self, name: str) -> None:
        """Note when a milestone was reached first."""
        self.milestones.setdefault(name, time.time())

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work``, timed as ``name``; inside another timed function that one counts."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.time()
            self._inside.append(name)
            try:
                return work(*args, **kwargs)
            finally:
                self._inside.pop()
                if not self._inside:
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.time() - start

        return run

    def load(self) -> Callable[..., None]:
        """Import the training, let it be observed, and return its ``run``."""
        self.reached("options")
        from shardmlx.loading.transfer import LocalFiles
        from shardmlx.training import command
        from shardmlx.training.report import TrainingReport

        for path, name in PARTS.items():
            target = f"shardmlx.{path}"
            patch(target, self.timed(name, resolve_name(target))).start()
        patch.object(LocalFiles, "load", self._loading(LocalFiles.load)).start()
        preparing = self._preparing(command.prepare_training)
        patch.object(command, "prepare_training", preparing).start()
        patch.object(TrainingReport, "step", self._step(TrainingReport.step)).start()
        self.reached("imports")

        def run(*given: Any) -> None:
            self.reached("MPI")
            command.run(*given)

        return run

    def _loading(self, load: Callable[..., None]) -> Callable[..., None]:
        load = self.timed(LOADING, load)

        def read(weights: Any, parts: Any, *given: Any) -> None:
            before = bytes_read()
            load(weights, parts, *given)
            self.loaded["read"] = bytes_read() - before
            self.loaded["stages"] = sum(
                array.nbytes
                for part in parts
                for name, array in part.parameters().items()
                if not name.endswith(ADAPTERS)
            )

        return read

    def _preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepared(*given: Any) -> Any:
            before = bytes_read()
            job = prepare(*given)
            self.loaded["preparing"] = bytes_read() - before
            self.reached("prepared")
            return job

        return prepared

    def _step(self, step: Callable[..., None]) -> Callable[..., None]:
        def stepped(*given: Any) -> None:
            self.reached("first step" if "first step" not in self.milestones else "second step")
            step(*given)

        return stepped


def main() -> int:
    directory, *arguments = sys.argv[1:]
    observed = Observed()
    status = run_ranks(
        lambda rank: LINE.load(arguments, rank), lambda config: config.timeout, observed.load
    )
    report = {
        "milestones": observed.milestones,
        "seconds": observed.seconds,
        "loaded": observed.loaded,
    }
    Path(directory, f"rank-{launched_rank()}.json").write_text(json.dumps(report))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
