#!/usr/bin/env python3
"""Kill a hub and its islands at random, and count whether each report counts once.

    python scripts/soak_hub.py --events 50 --seed 1

Four islands, threads that only pretend to train, report whole numbers to a real ``shardmlx hub``,
whose outer step adds up all differences. Events are SIGKILLs of the hub, after which it goes on
from its directory, and deaths of islands, which join anew; some islands leave for a while, and some
send a report twice. In the end the hub's
weights must have moved by the sum of all that was acknowledged.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
from _soaking import Record, parser_of

from shardmlx.common.http_listener import bind
from shardmlx.islands.protocol import Join, Joined, Progress, SharedTensor, report_path
from testbed.hub_process import started_hub

NAMES = ("ann", "ben", "cid", "dee")
NUMBERS = 1000
OPTIONS = "--outer-optimizer elastic:1 --deadline 0.5"
SECONDS_TO_SETTLE = 20.0


class Death(Exception):
    """The end of an island, which forgets all."""


class Island(threading.Thread):
    def __init__(self, name: str, url: str, token: str, seed: str) -> None:
        super().__init__(name=name)
        self.counts: Counter[str] = Counter()
        self.total = 0
        """Sum of all differences that the hub acknowledged."""
        self.must_die, self.must_end = threading.Event(), threading.Event()
        self._random = random.Random(seed)
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"})

    def run(self) -> None:
        while not self.must_end.is_set():
            try:
                self._live()
            except Death:
                self.counts["deaths of islands"] += 1
                self.must_die.clear()
        self.must_die.clear()
        self._ask("POST", "/progress", Progress(step=1, tokens=1, leaving=True).to_json())
        self._http.close()

    def _live(self) -> None:
        joined = self._join()
        base, last = self._take(), -1
        while not self.must_end.is_set():
            if self._random.random() < 0.05:
                self._ask("POST", "/progress", Progress(step=1, tokens=1, leaving=True).to_json())
                time.sleep(self._random.random())
                joined = self._join()
                self.counts["leaves"] += 1
            if base != last:
                self._report(joined.life, base)
                last = base
            time.sleep(self._random.random())
            if self.must_die.is_set():
                raise Death
            base = self._take()

    def _report(self, life: int, base: int) -> None:
        """Report once or twice; a hub that died before its answer may have counted it."""
        grown = self._random.randint(1, 9)
        path = report_path(0, life=life, base=base, rows=1, tokens=1)
        for _ in range(self._random.randint(1, 2)):
            answer = self._ask("PUT", path, np.full(NUMBERS, grown, np.float32).tobytes())
            if answer.status_code != 200:
                assert "version" in answer.json(), answer.text
                self.counts["counted before"] += 1
        self.counts["reports"] += 1
        self.total += grown

    def _join(self) -> Joined:
        tensor = SharedTensor("model.layers.0.lora_a", (NUMBERS,))
        message = Join(name=self.name, model={}, tensors=(tensor,), adapter_config={})
        joined = Joined.of_json(self._ask("POST", "/join", message.to_json()).json())
        if None in joined.versions:
            self._ask("PUT", "/fragments/0/seed", bytes(4 * NUMBERS))
        return joined

    def _take(self) -> int:
        """Take the newest weights."""
        return int(self._ask("GET", "/fragments/0").headers["x-version"])

    def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Ask until the hub answers."""
        content, json = (body, None) if isinstance(body, bytes) else (None, body)
        while True:
            try:
                answer = self._http.request(method, path, timeout=10, content=content, json=json)
            except httpx.TransportError:
                self.counts["requests without an answer"] += 1
            else:
                if not (answer.is_error and answer.json().get("retry")):
                    return answer
            time.sleep(0.05)


def started(directory: Path, port: int, options: str = OPTIONS) -> subprocess.Popen[str]:
    """Start a hub for all islands at a port."""
    hub, _ = started_hub(directory, NAMES, *options.split(), port=port)
    return hub


def soak(directory: Path, events: int, seed: int) -> bool:
    """Return whether the weights have moved by what was acknowledged; print what happened."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    chance = random.Random(seed)
    record = Record()
    hub = started(directory, port)
    url = f"http://127.0.0.1:{port}"
    tokens = {name: (directory / "tokens" / name).read_text() for name in NAMES}
    islands = [Island(name, url, tokens[name], f"{seed} {name}") for name in NAMES]
    for island in islands:
        island.start()
    for _ in range(events):
        time.sleep(chance.uniform(0.1, 0.8))
        if chance.random() < 0.35:
            hub.kill()
            hub.wait()
            hub = started(directory, port)
            record.counts["deaths of the hub"] += 1
        else:
            chance.choice(islands).must_die.set()
    for island in islands:
        island.must_end.set()
    for island in islands:
        island.join()
        record.counts += island.counts
    expected = -sum(island.total for island in islands)
    moved, until = 0.0, time.monotonic() + SECONDS_TO_SETTLE
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {tokens['ann']}"}) as http:
        while abs(moved - expected) > 0.5 and time.monotonic() < until:
            time.sleep(0.2)
            weights = np.frombuffer(http.get("/fragments/0").content, np.float32)
            assert (weights == weights[0]).all()
            moved = float(weights[0])
        record.counts["versions"] = int(http.get("/fragments/0").headers["x-version"])
    hub.terminate()
    hub.wait()
    if abs(moved - expected) > 0.5:
        record.fault(f"acknowledged: {-expected}; the weights moved by {-moved:g}")
    record.show()
    print(f"acknowledged: {-expected}; the weights moved by {-moved:g}")
    return not record.faults


def main() -> int:
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--events", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return 0 if soak(Path(directory) / "lab", options.events, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
