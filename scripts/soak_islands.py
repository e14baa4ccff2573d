#!/usr/bin/env python3
"""Let islands that train join, leave and die at random, and their hub too; replay what counted.

    python scripts/soak_islands.py --events 50 --seed 1

Four islands, one of them a pipeline of two ranks, train a tiny model on Python's documentation.
Events come alone or up to three at a time: an island joins, with its checkpoint or without; it
leaves; a rank of it is killed, or all of it; the hub is killed, and goes on from its directory.
Each event must be named by the hub's page or in an output, and rounds must go on, all within 90 s.

A proxy before the hub keeps what the islands sent and what the hub acknowledged: the outer weights
must be those that these reports make, each counted once, to the bit. Then runs that nobody disturbs
train as many tokens with other seeds, and losses are compared.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from _island_lab import FRAGMENTS, NAMES, RANKS, Island, Lab, replay
from _soaking import Record, parser_of
from mlx_lm.utils import load

from shardmlx.islands.protocol import Join, SharedTensor, fragments_of
from testbed.rows import write
from testbed.small_models import small_directory, tokenizer_directory

LAST_TOKENS = 400_000
"""Tokens that all islands train after the last event."""

ROW, TEXTS = 150, 64
"""Letters of a row, and rows of the validation set."""

PARTS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Parts of a run at whose ends the curves have points."""

SMOOTHED = 5
"""Versions that a point of a curve is the mean of."""

JOINS, ANEW, LEAVES = "an island joins", "an island joins anew", "an island leaves"
RANK, WHOLE, HUB_DIES = "a rank is killed", "an island is killed", "the hub is killed"


class Soak:
    """A disturbed run, runs beside it, and what is said of them."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._chance = root, random.Random(seed)
        self.record = Record()
        self.slowest = 0.0
        """Seconds in which all that happened at once was named, at most."""
        self.curves: list[list[float]] = []
        """Losses of each run at ``PARTS``."""
        text = "\n".join(topics[name] for name in sorted(topics))
        rows = [{"text": text[at : at + ROW]} for at in range(0, len(text), ROW)]
        random.Random(0).shuffle(rows)
        self.data, valid = root / "data", rows[:TEXTS]
        self.data.mkdir()
        for number, name in enumerate(NAMES):
            write(self.data / name, train=rows[TEXTS + number :: len(NAMES)], valid=valid)
        words = tokenizer_directory(root / "words", self.data / NAMES[0])
        self.model = small_directory(root / "model", words)
        self._network, tokenizer = load(str(self.model))[:2]
        self._texts = [mx.array(tokenizer.encode(row["text"])) for row in valid]

    def disturbed(self, events: int) -> int:
        """Train with so many events, and then a little more; return all tokens."""
        with self._lab("disturbed", 1) as lab:
            lab.start_islands()
            left, began = events, time.monotonic()
            while left:
                left -= self._burst(lab, min(left, self._chance.choice((1, 2, 3, 3))))
                status, seconds = lab.status(), time.monotonic() - began
                how_far = f"round {status['rounds']}, {status['tokens']} tokens, {seconds:.0f} s"
                print(f"{events - left} events: {how_far}", flush=True)
            lab.start_islands()
            lab.tokens = tokens = int(lab.status()["tokens"]) + LAST_TOKENS
            lab.hub.terminate()
            lab.hub.wait()
            lab.start_hub()
            lab.end()
        return tokens

    def undisturbed(self, tokens: int, seed: int) -> None:
        with self._lab(f"undisturbed-{seed}", seed, tokens) as lab:
            lab.start_islands()
            lab.end()

    @contextmanager
    def _lab(self, name: str, seed: int, tokens: int | None = None) -> Iterator[Lab]:
        """Yield what is to run, and look in the end at what it has done."""
        (self._root / name).mkdir()
        lab = Lab(self._root / name, self.model, self.data, seed, tokens)
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
                lab.record.fault(fault)
        self.record.faults += lab.record.faults
        versions = [*zip(*(weights for weights, _ in replays), strict=False)]

        def loss(version: int) -> float:
            for tensors, weights in zip(parts, versions[version], strict=True):
                self._network.load_weights([*named(tensors, weights)], strict=False)
            return self._loss()

        tokens = [lab.watch.facts[0][version]["tokens"] for version in range(len(versions))]
        ends = (max(SMOOTHED, bisect_right(tokens, part * tokens[-1])) for part in PARTS)
        self.curves.append([fmean(map(loss, range(end - SMOOTHED, end))) for end in ends])
        sent = [each for of_island in lab.proxy.sent.values() for each in of_island]
        answers = Counter(each.status for each in sent)
        print(f"{name}: {len(versions) - 1} rounds, {tokens[-1]} tokens", flush=True)
        print(f"{len(sent)} reports, answered so: {dict(answers)}")
        print("losses at parts of the tokens:", *(f"{each:.4f}" for each in self.curves[-1]))

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
            self.record.counts[event] += 1
            named.append((f"{event}: {target}", is_named))
        begun = time.monotonic()
        for what, is_named in named:
            lab.until(is_named, what)
        self.slowest = max(self.slowest, time.monotonic() - begun)
        for island in lab.islands.values():
            if island.has_ended():
                if island.name not in targets:
                    lab.record.fault(f"{island.name} ended by itself:\n{island.output}")
                island.close()
        if any(island.job is not None for island in lab.islands.values()):
            least = lab.status()["rounds"] + chance.randint(1, 5)
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


def named(tensors: Sequence[SharedTensor], weights: np.ndarray) -> Iterator[tuple[str, mx.array]]:
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes // 4
        yield tensor.name, mx.array(weights[start:end].reshape(tensor.shape))
        start = end


def main() -> int:
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--undisturbed", type=int, default=3, help="runs to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        soak = Soak(Path(directory), options.seed)
        tokens = soak.disturbed(options.events)
        soak.record.show()
        print(f"named within {soak.slowest:.0f} s", flush=True)
        for seed in range(1, options.undisturbed + 1):
            soak.undisturbed(tokens, seed)
    last, *others = (curve[-1] for curve in soak.curves)
    least, most = min(others, default=last), max(others, default=last)
    is_within = abs(last - (least + most) / 2) <= 1.5 * (most - least)
    print(f"noise: {most - least:.4f}; within it: {is_within}; faults: {len(soak.record.faults)}")
    return 0 if is_within and not soak.record.faults else 1


if __name__ == "__main__":
    sys.exit(main())
