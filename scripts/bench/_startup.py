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
    "loading.rank_setup.find_model_files": "finding the model",
    "training.worker.build_model": "building it, lazily",
    "training.plan_run.check_layout": "planning",
    "training.plan_run.think": "planning",
    "training.plan_run.read_tokenizer": "tokenizer and data",
    "training.plan_run.read_data": "tokenizer and data",
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
        self._read_before = 0

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
        from shardmlx.training import command
        from shardmlx.training.report import TrainingReport
        from shardmlx.training.run_worker import RunWorker
        from shardmlx.training.worker import TrainWorker

        for path, name in PARTS.items():
            target = f"shardmlx.{path}"
            patch(target, self.timed(name, resolve_name(target))).start()
        patch.object(TrainWorker, "load", self._loading(TrainWorker.load)).start()
        begin = self._beginning(RunWorker.begin_step)
        patch.object(RunWorker, "begin_step", begin).start()
        patch.object(TrainingReport, "step", self._step(TrainingReport.step)).start()
        self.reached("imports")

        def run(*given: Any) -> None:
            self.reached("MPI")
            self._read_before = bytes_read()
            command.run(*given)

        return run

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        load = self.timed(LOADING, load)

        def loaded(worker: Any, *given: Any) -> Any:
            before = bytes_read()
            result = load(worker, *given)
            self.loaded["read"] = bytes_read() - before
            self.loaded["stages"] = sum(
                array.nbytes
                for stage in worker.runs[-1].job.stages
                for name, array in stage.part.parameters().items()
                if not name.endswith(ADAPTERS)
            )
            return result

        return loaded

    def _beginning(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def beginning(*given: Any) -> Any:
            if "prepared" not in self.milestones:
                self.loaded["preparing"] = bytes_read() - self._read_before
            self.reached("prepared")
            return begin(*given)

        return beginning

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
