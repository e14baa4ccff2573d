#!/usr/bin/env python3
"""Kill ranks of a server at random, and have clients leave; compare every text that ends.

    python scripts/soak_serving.py --kills 20 --seed 1

``launch serve`` has a small model on two ranks, and four clients ask it for streams. Some leave in
the middle. A kill takes a rank, or asks launch to stop; a server then starts again. Every text that
ends must be that of a server which nobody disturbs. A stream that does not end must be refused or
cut: no client hangs. Each killed rank is named, and texts come again. Linux only.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from _soaking import Record, parser_of, small_model

from testbed.jobs import Running

RANKS = 2
CLIENTS = 4
SECONDS = 180.0
"""Time after which what does not happen is a fault."""

KILLS_A_START = 3
"""Kills after which launch is started anew: it waits longer before each restart."""

PROMPTS = tuple(f"Tell me of ship {number}" for number in range(12))
LEAVES = 0.15
"""Share of the clients that leave in the middle of a stream."""


class Soak:
    """A server, its clients, and what has happened."""

    def __init__(self, model: Path, seed: int, record: Record) -> None:
        self._model = model
        self._seed = seed
        self._random = random.Random(seed)
        self._record = record
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._wanted: dict[str, str] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])

    def _server(self) -> Running:
        launch = [sys.executable, "-m", "shardmlx", "launch", "-n", str(RANKS)]
        launch += ["--max-restarts", "9", "serve", "--model", str(self._model), "--port"]
        return Running([*launch, self._port, "--timeout", "20", "--grace", "10"])

    def _count(self, what: str) -> None:
        with self._lock:
            self._record.counts[what] += 1

    def _text_of(self, client: httpx.Client, prompt: str, *, leaves: bool) -> str | None:
        """Return the text that follows a prompt; None if the server has refused or cut it."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 60}
        pieces: list[str] = []
        options = {"model": "default", "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body | options) as answer:
            if answer.status_code != httpx.codes.OK:
                self._count(f"requests refused with status {answer.status_code}")
                return None
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return "".join(pieces)
                event = json.loads(line.removeprefix("data: ") or "{}")
                if "error" in event:
                    self._count("streams that ended with an error")
                    return None
                pieces += [each["delta"].get("content") or "" for each in event.get("choices", ())]
                if leaves and len(pieces) > 2:
                    self._count("clients that left")
                    return None
        self._count("streams that were cut")
        return None

    def _ask_on(self, number: int) -> None:
        """Ask for one text after the other, as one client."""
        chance = random.Random(f"{self._seed} {number}")
        with httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=SECONDS) as client:
            while not self._over.is_set():
                prompt = chance.choice(PROMPTS)
                leaves = chance.random() < LEAVES
                text = None
                try:
                    text = self._text_of(client, prompt, leaves=leaves)
                except httpx.TimeoutException:
                    self._record.fault(f"a client hangs that asked {prompt!r}")
                except httpx.ConnectError:
                    pass  # the server is about to start
                except httpx.HTTPError:
                    self._count("streams that were cut")
                if text is None:
                    self._over.wait(0.3)
                elif text != self._wanted[prompt]:
                    self._record.fault(f"{prompt!r}: {text!r}, not {self._wanted[prompt]!r}")
                else:
                    self._count("texts, the same as undisturbed")

    def undisturbed(self) -> None:
        """Ask a server that nobody disturbs for each text."""
        url = f"http://127.0.0.1:{self._port}"
        with self._server() as server, httpx.Client(base_url=url, timeout=SECONDS) as client:
            server.until(lambda: "Serving " in server.job().stdout, SECONDS)
            for prompt in PROMPTS:
                text = self._text_of(client, prompt, leaves=False)
                assert text is not None, "an undisturbed text ends"
                self._wanted[prompt] = text

    def run(self, kills: int) -> None:
        """Kill so often, while clients ask."""
        clients = [threading.Thread(target=self._ask_on, args=(k,)) for k in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            for first in range(0, kills, KILLS_A_START):
                self._one_start(min(KILLS_A_START, kills - first))
        finally:
            self._over.set()
            for client in clients:
                client.join(SECONDS)

    def _one_start(self, kills: int) -> None:
        """Kill ranks of one launch so often, and then ask it to stop."""
        with self._server() as server:
            for _ in range(kills):
                self._await_texts(server)
                time.sleep(self._random.uniform(0, 2))
                self._kill(server, self._random.randrange(RANKS))
            self._await_texts(server)
            server.process.send_signal(signal.SIGTERM)
            if server.wait(SECONDS) is None or server.left_behind():
                self._record.fault(f"it does not stop:\n{server.where_it_hangs().output[-3000:]}")
            self._count("servers that were asked to stop")

    def _kill(self, server: Running, rank: int) -> None:
        named = f"rank {rank} on"
        before = server.job().output.count(named)
        server.kill_rank(rank, signal.SIGKILL)
        self._count(f"kills of rank {rank}")
        server.until(lambda: server.job().output.count(named) > before, SECONDS)
        print(f"rank {rank} was killed, and named", flush=True)

    def _await_texts(self, server: Running) -> None:
        """Wait until texts come."""
        what = "texts, the same as undisturbed"
        least = self._record.counts[what] + CLIENTS
        server.until(lambda: self._record.counts[what] >= least, SECONDS)


def main(words: Sequence[str] | None = None) -> int:
    """Return 1 if something happened that must not."""
    parser = parser_of(str(__doc__))
    parser.add_argument("--kills", type=int, default=20, help="to make (default: 20)")
    flags = parser.parse_args(words)
    record = Record()
    with tempfile.TemporaryDirectory() as name:
        model, _ = small_model(Path(name))
        soak = Soak(model, flags.seed, record)
        soak.undisturbed()
        try:
            soak.run(flags.kills)
        except AssertionError as error:
            record.fault(str(error))
        record.show()
    return 1 if record.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
