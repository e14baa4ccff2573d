"""From the command to the first step. As a program, a rank that notes where the time goes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from scripts.bench import BEGAN
from scripts.bench.benchmark import Bench, Benchmark, Spread, as_flags, program, run, verdict
from scripts.bench.trained import PIRATE, SMOLLM2, demo_lacks, make_both
from shardmlx.common.environment import launched_rank
from shardmlx.config.train import LINE
from shardmlx.distributed.run_ranks import run_ranks
from testbed.jobs import ranks_command

RANKS = 2

MILESTONES = {
    "Python": "mpirun, and Python's start",
    "options": "options, OpenBLAS",
    "imports": "importing MLX, mlx-lm, shardmlx",
    "MPI": "starting MPI, meeting the other rank",
    "prepared": "preparing the run",
    "first step": "first step",
}
"""Each with what happens between the one before and it. The second step is for comparison."""

PARTS = {
    "loading.rank_setup.find_model_files": "finding the model",
    "training.worker.build_model": "building it, lazily",
    "training.plan_run.check_layout": "planning",
    "training.plan_run.think": "planning",
    "training.plan_run.read_tokenizer": "tokenizer and data",
    "training.plan_run.read_data": "tokenizer and data",
}
"""Functions that are timed, by the name under which the module that calls them knows them."""

ADAPTERS = (".lora_a", ".lora_b")
"""Ends of the names of weights that are made, not read."""


# A rank


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

        @wraps(work)
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
        from shardmlx.training.run_worker import RunWorker
        from shardmlx.training.worker import TrainWorker

        for path, name in PARTS.items():
            target = f"shardmlx.{path}"
            patch(target, self.timed(name, resolve_name(target))).start()
        load = self.timed("loading weights", TrainWorker.load)
        patch.object(TrainWorker, "load", self._loading(load)).start()
        patch.object(RunWorker, "begin_step", self._beginning(RunWorker.begin_step)).start()
        patch.object(TrainWorker, "step", self._stepping(TrainWorker.step)).start()
        self.reached("imports")

        def run(*given: Any) -> None:
            self.reached("MPI")
            self._read_before = bytes_read()
            command.run(*given)

        return run

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        # Rank 0 commands by the name of a method, and by how it is marked.
        @wraps(load)
        def loaded(worker: Any, *given: Any) -> Any:
            before = bytes_read()
            result = load(worker, *given)
            self.loaded["read"] = bytes_read() - before
            self.loaded["stages"] = sum(
                array.nbytes
                for stage in worker._last().stages
                for name, array in stage.part.parameters().items()
                if not name.endswith(ADAPTERS)
            )
            return result

        return loaded

    def _beginning(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(begin)
        def beginning(*given: Any) -> Any:
            if "prepared" not in self.milestones:
                self.loaded["preparing"] = bytes_read() - self._read_before
            self.reached("prepared")
            return begin(*given)

        return beginning

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def stepped(*given: Any) -> Any:
            result = step(*given)
            self.reached("second step" if "first step" in self.milestones else "first step")
            return result

        return stepped


def main() -> int:
    """``DIRECTORY ARGUMENTS``: train, and write DIRECTORY/rank-R.json: when each milestone was
    reached, in seconds since the epoch; the seconds inside what prepares the run; bytes read while
    loading weights and in all of the preparation; and those of the rank's stages."""
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


# The benchmark


@dataclass(frozen=True)
class Start:
    """The times of one start of the command, by rank, in seconds."""

    asked: float
    ranks: Sequence[Mapping[str, Any]]

    @property
    def total(self) -> float:
        """Return the seconds from the command to the end of the first step."""
        last: float = max(rank["milestones"]["first step"] for rank in self.ranks)
        return last - self.asked

    def phases(self, rank: int) -> dict[str, float]:
        """Return the parts of the time, in order; those of "preparing the run" are indented."""
        times = {"": self.asked, **self.ranks[rank]["milestones"]}
        phases = {}
        for before, after in pairwise(["", *MILESTONES]):
            phases[MILESTONES[after]] = times[after] - times[before]
            if after == "prepared":
                inside = self.ranks[rank]["seconds"]
                phases |= {f"  {name}": seconds for name, seconds in inside.items()}
                rest = phases[MILESTONES[after]] - sum(inside.values())
                phases["  agreeing, waiting, the rest"] = rest
        phases["(second step)"] = times["second step"] - times["first step"]
        return phases


def startup(bench: Bench) -> None:
    """The time from the command to the first step of SmolLM2 on two ranks, and what they read.

    LoRA of the demo's model on the demo's data, again and again: the files are in the system's
    cache after the first time, and the data are tokenised anew. Also what each rank reads while it
    loads, against the tensors of its stage and the header of the file. Run it where torch is not
    installed: transformers, which mlx-lm imports, imports it if it can. About two minutes on two
    cores.
    """
    if find_spec("torch") is not None:
        bench.say("warning: torch is installed, and is imported: starts take longer")
    model, data = make_both(bench) if bench.quick else (SMOLLM2, PIRATE)
    starts = [start(bench, model, data) for _ in range(bench.rounds)]
    bench.keep(starts=[vars(each) for each in starts])
    show_times(bench, starts)
    show_reading(bench, starts[-1], model)


def start(bench: Bench, model: Path, data: Path) -> Start:
    """Start the command once."""
    flags = {
        "model": model, "data": data, "num_layers": -1, "batch_size": 4, "iters": 2,
        "max_seq_length": 257, "steps_per_report": 1, "val_batches": 0,
        "adapter_path": bench.directory / "out",
    }  # fmt: skip
    asked = time.time()
    run(ranks_command(RANKS, *program("startup", bench.directory, *as_flags(flags))))
    files = [bench.directory / f"rank-{rank}.json" for rank in range(RANKS)]
    return Start(asked, [json.loads(file.read_text()) for file in files])


def show_times(bench: Bench, starts: Sequence[Start]) -> None:
    """Show medians of each phase on each rank."""
    of_ranks = [[each.phases(rank) for each in starts] for rank in range(RANKS)]
    names = list(dict.fromkeys(name for phases in of_ranks for each in phases for name in each))
    lines = [("start to first step", f"{Spread.of([each.total for each in starts]):.2f} s", "")]
    for name in names:
        cells = [
            f"{Spread.of([each[name] for each in phases]):.2f} s" if name in phases[0] else ""
            for phases in of_ranks
        ]
        lines.append((name, cells[0], cells[1]))
    header = ("what", *(f"rank {rank}, median (least-most)" for rank in range(RANKS)))
    bench.show(f"Start to first step, {RANKS} ranks", header, lines)


def show_reading(bench: Bench, last: Start, model: Path) -> None:
    """Show what each rank has read, beside what it needs."""
    headers = sum(header_bytes(file) for file in model.glob("*.safetensors"))
    lines = []
    for number, rank in enumerate(last.ranks):
        loaded = rank["loaded"]
        sizes = (loaded["stages"], headers, loaded["read"])
        reached = verdict(loaded["read"] / (loaded["stages"] + headers), 1, at_most=True)
        cells = [f"{nbytes / 2**20:.3f} MiB" for nbytes in (*sizes, loaded["preparing"])]
        lines.append((str(number), *cells[:3], reached, cells[3]))
    header = (
        "rank", "tensors of its stage", "header", "read while loading", "of both",
        "read preparing, modules and data too",
    )  # fmt: skip
    bench.show("Bytes read", header, lines)


def header_bytes(file: Path) -> int:
    """Return the bytes of a safetensors header: its length in eight bytes, and itself."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


STARTUP = Benchmark("startup", startup, rounds=7, needs=[demo_lacks])

if __name__ == "__main__":
    raise SystemExit(main())
