"""Interrupt training runs at random, resume them in other layouts, and compare every loss.

    python scripts/soak.py --cases 20 --seed 1

Each case is one run: some attempts that are killed, stopped or interrupted, each in a layout of its
own, and a last one that may finish. Between attempts this script may damage a checkpoint. Every
step must be made, with the loss of an undisturbed run. No job may hang or leave a process behind,
no other checkpoint may be damaged, and only steps after the last checkpoint may be lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from _soaking import Record, parser_of, small_model
from rich.progress import track

from shardmlx.checkpoint.store import Store
from shardmlx.errors import UserError
from testbed.jobs import SECONDS_TO_END, Running, patience
from testbed.runs import events, in_file

STEPS = 12
ATTEMPTS = 3
TOLERANCE = 1e-5
TIMEOUT = 6.0
"""Seconds after which a silent rank counts as lost: ``--timeout`` of the runs."""

LAYOUTS: Sequence[tuple[int, Sequence[str]]] = (
    (1, ()),
    (2, ("--schedule", "1f1b")),
    (2, ("--schedule", "gpipe")),
    (2, ("--schedule", "interleaved-1f1b")),
    (2, ("--schedule", "zb-v")),
    (2, ("--pipeline-stages", "1")),
    (3, ("--schedule", "zb-h1")),
    (4, ("--pipeline-stages", "2", "--schedule", "1f1b")),
)

RUNS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lora": {"optimizer": "adamw"},
        "full": {"fine_tune_type": "full", "unfreeze_all": True, "grad_accumulation_steps": 2},
    }
)


@dataclass(frozen=True)
class Broken:
    """An event that ends a job, and the seconds that the job may take beyond ``SECONDS_TO_END``."""

    happen: Callable[[Running, random.Random], None]
    seconds: float = 0.0


def _kill_a_rank(job: Running, chance: random.Random) -> None:
    _signal_a_rank(job, chance, signal.SIGKILL)


def _stop_a_rank(job: Running, chance: random.Random) -> None:
    _signal_a_rank(job, chance, signal.SIGSTOP)


def _signal_a_rank(job: Running, chance: random.Random, number: signal.Signals) -> None:
    ranks = [pid for rank in range(4) if (pid := job.pid_of(rank)) is not None]
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(ranks or [job.process.pid]), number)


def _to_mpirun(number: signal.Signals) -> Callable[[Running, random.Random], None]:
    return lambda job, chance: job.process.send_signal(number)


BROKEN: Mapping[str, Broken] = MappingProxyType(
    {
        "a rank is killed": Broken(_kill_a_rank),
        "a rank is stopped": Broken(_stop_a_rank, TIMEOUT),
        "mpirun is killed": Broken(_to_mpirun(signal.SIGKILL)),
        "SIGTERM to mpirun": Broken(_to_mpirun(signal.SIGTERM)),
        "SIGUSR1 to mpirun": Broken(_to_mpirun(signal.SIGUSR1)),
    }
)
OFTEN = ("a rank is killed",) * 3
"""Events that are drawn more often than the others."""


@dataclass
class Soak:
    """A soak test: it runs the cases, and counts events and faults."""

    root: Path
    chance: random.Random
    record: Record = field(default_factory=Record)
    slowest: float = 0.0
    usual_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Make a tiny model and real data, and run what nobody disturbs."""
        self.model, self.data = small_model(self.root)
        self.expected: dict[str, dict[int, float]] = {}
        for run in RUNS:
            directory = self.root / run
            directory.mkdir()
            begun = time.monotonic()
            with self.start(run, directory, 0, 2, ()) as job:
                if job.wait(120.0) != 0:
                    raise SystemExit(f"the undisturbed run failed:\n{job.job().output}")
            self.usual_seconds = time.monotonic() - begun
            self.expected[run] = losses(directory / "metrics-0.jsonl")

    def start(
        self, run: str, directory: Path, attempt: int, n: int, layout: Sequence[str]
    ) -> Running:
        """Start one attempt at a run, whose files are in ``directory``."""
        options: list[str | Path] = ["--model", self.model, "--data", self.data, "--seed", "3"]
        options += ["--batch-size", "4", "--micro-batch-size", "1", "--num-layers", "-1"]
        options += ["--iters", str(STEPS), "--learning-rate", "1e-3", "--max-seq-length", "64"]
        options += ["--steps-per-report", "1", "--steps-per-eval", "4", "--val-batches", "1"]
        options += ["--save-every", "5", "--adapter-path", directory / "out"]
        options += in_file(directory / "options.yaml", **RUNS[run])
        options += ["--checkpoint-dir", directory / "checkpoints", "--checkpoint-every", "2"]
        options += ["--metrics-file", directory / f"metrics-{attempt}.jsonl"]
        options += ["--timeout", f"{TIMEOUT:g}", *layout]
        # A killed mpirun leaves files behind. A later one with the same process number would fail
        # to start because of them.
        temporary = directory / f"tmp-{attempt}"
        temporary.mkdir()
        environment = {"TMPDIR": str(temporary)}
        return Running.ranks(n, "-m", "shardmlx.train", *options, env=environment)

    def case(self, number: int) -> None:
        """Make one run, interrupted in all attempts but the last."""
        run = self.chance.choice(list(RUNS))
        directory = self.root / f"case-{number}"
        directory.mkdir()
        store = Store(directory / "checkpoints")
        made: set[int] = set()
        spoiled: set[int] = set()
        for attempt in range(ATTEMPTS):
            n, layout = self.chance.choice(LAYOUTS)
            broken = self.chance.choice([*BROKEN, *OFTEN]) if attempt < ATTEMPTS - 1 else None
            if broken == "a rank is stopped" and n == 1:
                broken = "a rank is killed"  # nobody could notice it
            where = f"case {number}, {run}, attempt {attempt}, {n} ranks {' '.join(layout)}"
            where += f", {broken}" if broken else ""
            before = newest_sound(store)
            with self.start(run, directory, attempt, n, layout) as job:
                self._let_run(where, broken, job, store)
            metrics = directory / f"metrics-{attempt}.jsonl"
            self._check_checkpoints(where, store, spoiled)
            made |= self._check_losses(where, metrics, run, before)
            if broken and self.chance.random() < 0.4:
                spoiled |= self._damage(store)
        if missing := self.expected[run].keys() - made:
            self.record.fault(f"case {number}, {run}: steps {sorted(missing)} were never made")
        shutil.rmtree(directory)

    def _let_run(self, where: str, broken: str | None, job: Running, store: Store) -> None:
        moment = self.chance.uniform(0.0, 1.1 * self.usual_seconds)
        if broken is None or job.wait(moment) is not None:
            self.record.counts["left to its end"] += 1
            if job.wait(120.0) != 0:
                self.record.fault(f"{where}: failed\n{job.where_it_hangs().output}")
            return
        self.record.counts[broken] += 1
        committed = newest_sound(store)
        begun = time.monotonic()
        BROKEN[broken].happen(job, self.chance)
        limit = BROKEN[broken].seconds
        if job.wait(patience(limit + SECONDS_TO_END)) is None:
            self.record.fault(f"{where}: hangs\n{job.where_it_hangs().output}")
        self.slowest = max(self.slowest, time.monotonic() - begun - limit)
        if left := job.left_behind():
            self.record.fault(
                f"{where}: left processes behind: {left}\n{job.where_it_hangs().output}"
            )
        if (newest_sound(store) or 0) < (committed or 0):
            self.record.fault(f"{where}: the checkpoint of step {committed} is lost")

    def _check_checkpoints(self, where: str, store: Store, spoiled: set[int]) -> None:
        """Record a fault for each damaged checkpoint that this script did not damage."""
        for step in store.steps():
            self.record.counts["checkpoints looked at"] += 1
            fault = fault_of(store, step)
            if fault and step not in spoiled:
                self.record.fault(f"{where}: damaged checkpoint: {fault}")

    def _check_losses(self, where: str, metrics: Path, run: str, before: int | None) -> set[int]:
        """Return the steps of an attempt; record wrong losses, and a resume from another step."""
        if not metrics.exists():
            return set()
        for event in events(metrics, "resume"):
            self.record.counts["resumed"] += 1
            if event["step"] != before:
                self.record.fault(f"{where}: resumed from step {event['step']}, not {before}")
        made = losses(metrics)
        for step, loss in made.items():
            self.record.counts["steps compared"] += 1
            expected = self.expected[run][step]
            if abs(loss - expected) > TOLERANCE * abs(expected):
                self.record.fault(f"{where}: step {step}: loss {loss}, not {expected}")
        return set(made)

    def _damage(self, store: Store) -> set[int]:
        """Damage a file of the newest checkpoint, if an older one is sound; return its step."""
        steps = store.steps()
        if all(fault_of(store, step) for step in steps[:-1]):
            return set()
        path = self.chance.choice(sorted(store.path(steps[-1]).iterdir()))
        content = bytearray(path.read_bytes())
        how = self.chance.choice(["a bit is flipped", "a file is torn", "a file is deleted"])
        self.record.counts[how] += 1
        if how == "a bit is flipped":
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)
        elif how == "a file is torn":
            path.write_bytes(content[: self.chance.randrange(len(content))])
        else:
            path.unlink()
        return {steps[-1]}


def losses(metrics: Path) -> dict[int, float]:
    """Return the loss of each step of a metrics file."""
    return {event["step"]: event["loss"] for event in events(metrics, "train")}


def fault_of(store: Store, step: int) -> str | None:
    """Return the fault of a complete checkpoint; None if it is sound."""
    try:
        manifest = store.manifest(step)
    except UserError as error:
        return str(error)
    return next(filter(None, (store.fault(step, file) for file in manifest.files)), None)


def newest_sound(store: Store) -> int | None:
    """Return the step to resume from; None without a sound checkpoint."""
    return next((s for s in reversed(store.steps()) if fault_of(store, s) is None), None)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=20, help="runs to interrupt (default: 20)")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(Path(directory), random.Random(flags.seed))
        for number in track(range(flags.cases), "soaking"):
            soak.case(number)
    soak.record.counts["runs"] = flags.cases
    soak.record.show()
    print(f"slowest end after an event, beyond --timeout: {soak.slowest:.1f} s")
    return 1 if soak.record.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
