#!/usr/bin/env python3
"""Let islands that train join, leave and die at random, and their hub too; replay what counted.

    python scripts/soak_islands.py --events 50 --seed 1

Four islands, one of them a pipeline of two ranks, train a tiny model on real text, under mpirun.
Events come alone or up to three at a time: an island joins, with its checkpoint or without; it
leaves; a rank of it is killed, or all of it; the hub is killed, and goes on from its directory.
Each event must be named by the hub's page or in an output, and rounds must go on, all within
``PATIENCE`` seconds. A proxy before the hub keeps what the islands sent and what the hub
acknowledged: the outer weights must be those which these reports make, each counted once, to the
bit. Then runs that nobody disturbs make as many rounds with other seeds, and losses are compared.
"""

from __future__ import annotations

import _root

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from _island_reports import Proxy, Watch, replay
from mlx_lm.utils import load
from soak_hub import NAMES, started

from shardmlx.common.http_listener import bind
from shardmlx.islands.client import TOKEN
from shardmlx.islands.protocol import Join, Tensor, fragments_of
from tests.helpers.jobs import Running
from tests.helpers.mpirun import in_file
from tests.helpers.small_models import pirate_directory, small_directory, tokenizer_directory

RANKS = dict.fromkeys(NAMES, 1) | {NAMES[-1]: 2}
STEPS, FRAGMENTS = 20, 2
HUB = f"--inner-steps {STEPS} --fragments {FRAGMENTS} --overlap 5 --deadline 5 --missing-after 15"
PATIENCE = 90.0
"""Seconds for what must happen; two heartbeats and the start of a rank on a busy machine."""

LAST_ROUNDS = 5
"""Rounds that all islands make after the last event."""

TEXTS, LENGTH = 48, 96
"""Texts of the validation set, and tokens of each."""

SMOOTHED = 5
"""Versions that a point of a curve is the mean of."""

TRAINING = {
    "fine_tune_type": "full", "num_layers": -1, "optimizer": "adam", "learning_rate": 1e-3,
    "batch_size": 4, "max_seq_length": 64, "iters": 10**7, "steps_per_report": 10,
    "steps_per_eval": 100, "val_batches": 1, "save_every": 10**9, "checkpoint_every": 50,
    "timeout": 20, "schedule": "1f1b", "micro_batch_size": 2,
}  # fmt: skip

JOINS, ANEW, LEAVES = "an island joins", "an island joins anew", "an island leaves"
RANK, WHOLE, HUB_DIES = "a rank is killed", "an island is killed", "the hub is killed"


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
    rounds: int | None = None
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
        limit = "" if self.rounds is None else f" --rounds {self.rounds}"
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

    def end(self) -> int:
        """Let all islands train to the end of the run; return its rounds."""
        for island in self.islands.values():
            assert island.job is not None
            self.until(island.has_ended, f"{island.name} ends with the run")
            if island.job.process.poll() or "the hub has ended the run" not in island.output:
                self.fault(f"{island.name} ended otherwise:\n{island.output}")
        return int(self.status()["rounds"])

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


class Soak:
    """A disturbed run, runs beside it, and what is said of them."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._chance = root, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.curves: list[list[float]] = []
        """The loss of each version of each run."""
        whole, some = root / "whole", root / "some"
        pirate_directory(some, whole)
        self.model = small_directory(root / "model", tokenizer_directory(root / "words", whole))
        self.data = root / "data"
        splits = {
            each: (whole / f"{each}.jsonl").read_text().splitlines(keepends=True)
            for each in ("train", "valid")
        }
        for number, name in enumerate(NAMES):
            (self.data / name).mkdir(parents=True)
            own = splits["train"][number :: len(NAMES)]
            (self.data / name / "train.jsonl").write_text("".join(own))
            (self.data / name / "valid.jsonl").write_text("".join(splits["valid"]))
        self._network, tokenizer = load(str(self.model))[:2]
        rows = [json.loads(line) for line in splits["valid"][:TEXTS]]
        self._texts = [
            mx.array(tokenizer.apply_chat_template(row["messages"])[:LENGTH]) for row in rows
        ]

    def disturbed(self, events: int) -> int:
        """Train with so many events, and then a few rounds more; return all rounds."""
        with self._lab("disturbed", 1) as lab:
            lab.start_islands()
            left = events
            while left:
                left -= self._burst(lab, min(left, self._chance.choice((1, 1, 2, 3))))
                print(f"{events - left} events, round {lab.status()['rounds']}", flush=True)
            lab.start_islands()
            lab.rounds = lab.status()["rounds"] + LAST_ROUNDS
            lab.hub.terminate()
            lab.hub.wait()
            lab.start_hub()
            return lab.end()

    def undisturbed(self, rounds: int, seed: int) -> None:
        with self._lab(f"undisturbed-{seed}", seed, rounds) as lab:
            lab.start_islands()
            lab.until(lambda: bool(lab.status()["ended"]), "the run ends", 3600)
            lab.end()

    @contextmanager
    def _lab(self, name: str, seed: int, rounds: int | None = None) -> Iterator[Lab]:
        """Yield what is to run, and look in the end at what it has done."""
        (self._root / name).mkdir()
        lab = Lab(self._root / name, self.model, self.data, seed, rounds)
        try:
            yield lab
        finally:
            lab.close()
        self._judge(name, lab)

    def _judge(self, name: str, lab: Lab) -> None:
        """Replay a run from its reports, and keep the losses of its versions."""
        run = json.loads((lab.path / "run.json").read_bytes())
        parts = fragments_of(Join.of_json(run["first"]).tensors, FRAGMENTS)
        replays = [replay(lab.watch, lab.proxy, k) for k in range(FRAGMENTS)]
        for _, faults in replays:
            for fault in faults:
                lab.fault(fault)
        self.faults += lab.faults
        losses = []
        for versions in zip(*(weights for weights, _ in replays), strict=False):
            for tensors, weights in zip(parts, versions, strict=True):
                self._network.load_weights([*named(tensors, weights)], strict=False)
            losses.append(self._loss())
        self.curves.append(losses)
        sent = [each for of_island in lab.proxy.sent.values() for each in of_island]
        answers = Counter("repeated" if each.is_repeated else each.status for each in sent)
        print(f"{name}: {len(losses) - 1} rounds, answers to {len(sent)} reports: {answers}")

    def _burst(self, lab: Lab, most: int) -> int:
        """Let up to so many things happen at once, and wait until each is named; return how
        many did."""
        chance = self._chance
        absent = [name for name, island in lab.islands.items() if island.job is None]
        pool = [*NAMES, "hub", *absent * 3]
        chance.shuffle(pool)
        targets = [*dict.fromkeys(pool)][:most]
        # The hub is the last: what the others do is then under way.
        targets.sort(key=lambda each: each == "hub")
        seen = {name: island.output.count("trying again") for name, island in lab.islands.items()}
        named: list[tuple[str, Callable[[], bool]]] = []
        for target in targets:
            if target == "hub":
                event, is_named = HUB_DIES, self._kill_hub(lab, targets, seen)
            else:
                event, is_named = self._disturb(lab, lab.islands[target])
            self.counts[event] += 1
            named.append((f"{event}: {target}", is_named))
        for what, is_named in named:
            lab.until(is_named, what)
        for island in lab.islands.values():
            if island.has_ended():
                if island.name not in targets:
                    lab.fault(f"{island.name} ended by itself:\n{island.output}")
                island.close()
        if any(island.job is not None for island in lab.islands.values()):
            least = lab.status()["rounds"] + chance.randint(1, 8)
            lab.until(lambda: lab.status()["rounds"] >= least, f"rounds after {targets}")
        time.sleep(chance.uniform(0, 1))
        return len(targets)

    def _kill_hub(
        self, lab: Lab, targets: Sequence[str], seen: Mapping[str, int]
    ) -> Callable[[], bool]:
        others = [
            each
            for each in lab.islands.values()
            if each.job is not None and each.name not in targets
        ]
        lab.kill_hub()
        return lambda: (
            not others
            or any(each.output.count("trying again") > seen[each.name] for each in others)
        )

    def _disturb(self, lab: Lab, island: Island) -> tuple[str, Callable[[], bool]]:
        """Let something happen to an island; return what, and whether it is named."""
        name = island.name
        if island.job is None:
            event = self._chance.choice((JOINS, ANEW))
            island.start(anew=event == ANEW)
            return event, lambda: island.trains and lab.is_present(name)
        event, job = self._chance.choice((LEAVES, RANK, WHOLE)), island.job
        if event == LEAVES:
            job.process.send_signal(signal.SIGUSR1)
        elif event == RANK:
            job.kill_rank(self._chance.randrange(RANKS[name]), signal.SIGKILL)
        else:
            job.kill(signal.SIGKILL)
        words = {LEAVES: r"SIGUSR1: saving, then leaving", RANK: r"died|signal 9", WHOLE: ""}[event]
        return (
            event,
            lambda: (
                island.has_ended()
                and re.search(words, island.output) is not None
                and not lab.is_present(name)
            ),
        )

    def _loss(self) -> float:
        total = count = 0
        for text in self._texts:
            logits = self._network(text[None, :-1])
            total += nn.losses.cross_entropy(logits, text[None, 1:], reduction="sum").item()
            count += len(text) - 1
        return total / count


def named(tensors: Sequence[Tensor], weights: np.ndarray) -> Iterator[tuple[str, mx.array]]:
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes // 4
        yield tensor.name, mx.array(weights[start:end].reshape(tensor.shape))
        start = end


def smoothed(curve: Sequence[float], at: float) -> float:
    """Return the loss at a part of a curve."""
    end = max(SMOOTHED, round(at * len(curve)))
    return float(np.mean(curve[end - SMOOTHED : end]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--undisturbed", type=int, default=3, help="runs to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        soak = Soak(Path(directory), options.seed)
        rounds = soak.disturbed(options.events)
        for seed in range(1, options.undisturbed + 1):
            soak.undisturbed(rounds, seed)
    for what, count in sorted(soak.counts.items()):
        print(f"{what}: {count}")
    print("loss after a part of the rounds: disturbed, then undisturbed")
    for at in (0.1, 0.25, 0.5, 0.75, 1.0):
        print(f"{at:4.0%}", *(f"{smoothed(curve, at):.4f}" for curve in soak.curves))
    last, *others = (smoothed(curve, 1.0) for curve in soak.curves)
    least, most = min(others, default=last), max(others, default=last)
    is_within = abs(last - (least + most) / 2) <= 1.5 * (most - least)
    print(f"noise: {most - least:.4f}; within it: {is_within}; faults: {len(soak.faults)}")
    return 0 if is_within and not soak.faults else 1


if __name__ == "__main__":
    sys.exit(main())
