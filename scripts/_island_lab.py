"""A hub and islands that train, for soak_islands.py."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from _island_reports import Proxy, Watch
from soak_hub import NAMES, started

from shardmlx.common.http_listener import bind
from shardmlx.islands.client import TOKEN
from testbed.jobs import Running
from testbed.runs import in_file

RANKS = dict.fromkeys(NAMES, 1) | {NAMES[-1]: 2}
STEPS, FRAGMENTS = 10, 2
HUB = f"--inner-steps {STEPS} --fragments {FRAGMENTS} --overlap 3 --deadline 5"
PATIENCE = 90.0
"""Seconds for what must happen; two heartbeats and the start of a rank on a busy machine."""

TRAINING: dict[str, Any] = {
    "fine_tune_type": "full", "num_layers": -1, "optimizer": "adam", "learning_rate": 1e-3,
    "batch_size": 4, "max_seq_length": 64, "iters": 10**7, "steps_per_report": 10,
    "steps_per_eval": 100, "val_batches": 1, "save_every": 10**9, "checkpoint_every": 50,
    "timeout": 20, "schedule": "1f1b",
}  # fmt: skip


@dataclass
class Island:
    """A training job, which comes and goes."""

    name: str
    directory: Path
    command: Sequence[str | Path]
    env: Mapping[str, str]
    job: Running | None = None
    lives: int = 0

    @property
    def metrics(self) -> Path:
        return self.directory / f"metrics-{self.lives}.jsonl"

    def start(self, *, anew: bool = False) -> None:
        if anew:
            shutil.rmtree(self.directory / "checkpoints", ignore_errors=True)
        self.lives += 1
        words = [*self.command, "--metrics-file", self.metrics]
        self.job = Running.ranks(RANKS[self.name], "-m", "shardmlx.train", *words, env=self.env)

    @property
    def output(self) -> str:
        return "" if self.job is None else self.job.job().output

    @property
    def trains(self) -> bool:
        return self.metrics.exists() and '"train"' in self.metrics.read_text()

    def has_ended(self) -> bool:
        return self.job is not None and self.job.process.poll() is not None and not self.job.pids()

    def close(self) -> None:
        if self.job is not None:
            self.job.__exit__()
            self.job = None


@dataclass
class Lab:
    """A hub, its islands, and what watches them."""

    directory: Path
    model: Path
    data: Path
    seed: int
    tokens: int | None = None
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        with bind("127.0.0.1", 0) as free:
            self._port = free.getsockname()[1]
        self.path = self.directory / "hub"
        self.islands: dict[str, Island] = {}
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=30)
        self.proxy = Proxy(self._port)
        self.watch = Watch(self.path)
        self.start_hub()
        for number, name in enumerate(NAMES):
            token = (self.path / "tokens" / name).read_text()
            self.proxy.names[token] = name
            self.islands[name] = self._island(number, name, token)
        self.watch.start()

    def _island(self, number: int, name: str, token: str) -> Island:
        directory = self.directory / name
        directory.mkdir()
        config = in_file(
            directory / "options.yaml",
            **TRAINING,
            micro_batch_size=TRAINING["batch_size"] // RANKS[name],
            model=str(self.model),
            data=str(self.data / name),
            seed=10 * self.seed + number,
            adapter_path=str(directory / "out"),
            checkpoint_dir=str(directory / "checkpoints"),
            island=f"http://127.0.0.1:{self.proxy.port}",
            name=name,
        )
        return Island(name, directory, config, {TOKEN: token, "OPENBLAS_NUM_THREADS": "1"})

    def start_hub(self) -> None:
        limit = "" if self.tokens is None else f" --tokens {self.tokens}"
        self.hub = started(self.path, self._port, HUB + limit)

    def start_islands(self) -> None:
        """Start the islands that are absent, and wait until all train."""
        for island in self.islands.values():
            if island.job is None:
                island.start()
        every = self.islands.values()
        self.until(lambda: all(each.trains for each in every), "all islands train")

    def kill_hub(self) -> None:
        self.hub.kill()
        self.hub.wait()
        self.start_hub()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get("/status").json()
        return found

    def is_present(self, name: str) -> bool:
        return bool(self.status()["islands"][name]["present"])

    def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> bool:
        """Wait for a condition; record a fault if it does not come."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                said = "".join(
                    f"\n--- {name}\n{each.output[-1500:]}" for name, each in self.islands.items()
                )
                self.fault(f"not within {seconds:g} s: {what}{said}\n{self.status()}")
                return False
            time.sleep(0.2)
        return True

    def fault(self, what: str) -> None:
        self.faults.append(what)
        print(what, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Let all islands train to the end of the run."""
        self.until(lambda: bool(self.status()["ended"]), "the run ends", 3600)
        for island in self.islands.values():
            assert island.job is not None
            self.until(island.has_ended, f"{island.name} ends with the run")
            if island.job.process.poll() or "the hub has ended the run" not in island.output:
                self.fault(f"{island.name} ended otherwise:\n{island.output}")

    def close(self) -> None:
        for island in self.islands.values():
            island.close()
        self.hub.terminate()
        self.hub.wait()
        self.watch.must_end.set()
        self.watch.join()
        self.watch.look()
        self.proxy.close()
        self._http.close()
