"""Real jobs in which each rank is killed, or stopped, at each command of a training run.

    python -m tests.helpers.lost_at_commands

Each job must end with one line, which names the rank, within ``--timeout`` and ten seconds, and
leave whole what was saved before. It takes 10 seconds a job; ``--only WORD ...`` chooses commands.
The suite tries three (``tests/mpi/test_failure.py``), and fails at all in one process
(``tests/unit/training/test_every_command.py``).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.checkpoint.store import Store
from testbed.jobs import AFTER_A_KILL, SECONDS_TO_END, Job, Running
from testbed.small_models import pirate_directory, small_directory, tokenizer_directory
from tests.helpers.commands import commands
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.programs import PROGRAMS

RANKS = 2
SILENCE = 5.0
"""Seconds after which a stopped rank counts as lost: the jobs' ``--timeout``."""

ENDS = {"kill": "died", "stop": "has given no sign of life"}
WORKERS = ("LocalFiles", "ModelWorker", "RunWorker", "SeenCheckpoints", "TrainWorker")
"""Classes whose methods are commands of a training run."""

NOT_GIVEN = "is not given in this run"


@dataclass(frozen=True)
class Loss:
    """A ``rank`` that is lost at a command, and ``how``."""

    command: str
    rank: int
    how: str


class Jobs:
    """Jobs that go on from a checkpoint of step 2, and save more."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        data = pirate_directory(directory / "data", directory / "whole")
        model = small_directory(directory / "model", tokenizer_directory(directory / "words", data))
        self._words: list[str | Path] = [
            *("--model", model, "--data", data, "--num-layers", "-1", "--val-batches", "1"),
            *("--micro-batch-size", "1", "--schedule", "1f1b", "--no-pack", "--train", "--test"),
            *("--checkpoint-every", "2", "--test-batches", "1"),
        ]
        self._saved = directory / "saved"
        self._run(self._saved, ("-m", "shardmlx.train"), iters=2)

    def fault(self, loss: Loss) -> str | None:
        """Return what is wrong with the end of a job in which a rank is lost so; None if nothing
        is."""
        directory = self._directory / "job"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._saved, directory)
        method = commands()[loss.command]
        program = (PROGRAMS / "failing_rank.py", str(loss.rank))
        path = f"{method.__module__}.{loss.command}"
        job, ended = self._run(directory, (*program, path, loss.how), iters=4)
        status = job.returncode
        lost = directory / "lost"
        if not lost.exists():
            return NOT_GIVEN if status == 0 else f"status {status} before it:\n{job.output}"
        seconds = ended - lost.stat().st_mtime
        limit = SECONDS_TO_END + (SILENCE if loss.how == "stop" else 0.0)
        if seconds > limit:
            return f"ended after {seconds:.1f} s, not {limit:.0f}"
        if status not in (AFTER_A_KILL if loss.how == "kill" else {1}):
            return f"status {status}:\n{job.output}"
        lines = job.error_lines
        named = re.compile(rf"rank {loss.rank} on \S+ {ENDS[loss.how]}")
        if len(lines) != 1 or not named.search(lines[0]):
            return f"it says {lines}"
        return self._what_is_lost(directory)

    def _what_is_lost(self, directory: Path) -> str | None:
        if not load_arrays(directory / "out" / "adapters.safetensors"):
            return "no adapters are left"
        store = Store(directory / "kept")
        steps = store.steps()
        if not steps or not {*steps} <= {2, 4}:
            return f"checkpoints of {steps}"
        faults = [
            fault
            for step in steps
            for file in store.manifest(step).files
            if (fault := store.fault(step, file)) is not None
        ]
        return "; ".join(faults) or None

    def _run(
        self, directory: Path, program: Sequence[str | Path], *, iters: int
    ) -> tuple[Job, float]:
        """Return a job that has ended, and when. One that hangs, or leaves processes behind, has
        the status -1."""
        places: list[str | Path] = ["--adapter-path", directory / "out"]
        places += ["--checkpoint-dir", directory / "kept"]
        words: list[str | Path] = [*self._words, *places, "--iters", str(iters)]
        words += ["--timeout", f"{SILENCE:g}"]
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "LOST": str(directory / "lost")}
        with Running.ranks(RANKS, *program, *words, env=env) as running:
            hangs = running.wait(300.0) is None
            ended = time.time()
            left = [] if hangs else running.left_behind()
            job = running.where_it_hangs() if hangs else running.job()
        return (replace(job, returncode=-1) if hangs or left else job), ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    only = parser.parse_args(arguments).only
    chosen = [
        name
        for name in commands()
        if name.startswith(WORKERS) and any(word in name for word in only)
    ]
    faults = 0
    with tempfile.TemporaryDirectory(prefix="lost-") as name:
        jobs = Jobs(Path(name))
        for command in chosen:
            for loss in (Loss(command, rank, how) for rank in range(RANKS) for how in ENDS):
                fault = jobs.fault(loss)
                print(f"{command:36} rank {loss.rank} {loss.how}: {fault or 'ok'}", flush=True)
                if fault == NOT_GIVEN:
                    break
                faults += fault is not None
    print(f"{faults} faults" if faults else "all well")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
