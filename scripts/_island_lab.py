"""A hub and islands that train, a proxy that keeps their reports, and what a run must have made of
them: for soak_islands.py."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import add
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import numpy as np
from _soaking import Record

from shardmlx.common.http_listener import bind
from shardmlx.islands.aggregate import weighted_mean
from shardmlx.islands.client import TOKEN
from shardmlx.islands.outer import NESTEROV, OuterOptimizer
from shardmlx.islands.store import Report
from testbed.hub_process import started_hub
from testbed.jobs import Running
from testbed.runs import in_file

NAMES = ("ann", "ben", "cid", "dee")
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
    record: Record = field(default_factory=Record)

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
        self.hub, _ = started_hub(self.path, NAMES, *(HUB + limit).split(), port=self._port)

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
                self.record.fault(f"not within {seconds:g} s: {what}{said}\n{self.status()}")
                return False
            time.sleep(0.2)
        return True

    def end(self) -> None:
        """Let all islands train to the end of the run."""
        self.until(lambda: bool(self.status()["ended"]), "the run ends", 3600)
        for island in self.islands.values():
            assert island.job is not None
            self.until(island.has_ended, f"{island.name} ends with the run")
            if island.job.process.poll() or "the hub has ended the run" not in island.output:
                self.record.fault(f"{island.name} ended otherwise:\n{island.output}")

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


# Reports, and what they make


@dataclass(frozen=True)
class Sent:
    """A report that went through the proxy; ``status`` is None without an answer of the hub."""

    report: Report
    body: bytes
    status: int | None


class Proxy:
    """Stands before a hub, and keeps reports. Without an answer of the hub it gives none."""

    def __init__(self, to: int) -> None:
        self.sent: dict[tuple[int, str], list[Sent]] = defaultdict(list)
        """Reports of each fragment and island, in their order."""
        self.names: dict[str, str] = {}
        """The island of each token."""
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                proxy.answer(self, to)

            do_POST = do_PUT = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, asked: BaseHTTPRequestHandler, to: int) -> None:
        asked.close_connection = True
        length = int(asked.headers.get("content-length", 0))
        body = asked.rfile.read(length)
        if len(body) < length:
            return
        status, answer = None, b""
        hub = HTTPConnection("127.0.0.1", to, timeout=60)
        with suppress(OSError, HTTPException):
            hub.request(asked.command, asked.path, body, dict(asked.headers))
            response = hub.getresponse()
            answer, status = response.read(), response.status
        hub.close()
        self._keep(asked, body, status)
        if status is None:
            return
        with suppress(OSError):
            asked.send_response_only(status)
            for name, value in response.getheaders():
                if name.lower() != "connection":
                    asked.send_header(name, value)
            asked.end_headers()
            asked.wfile.write(answer)

    def _keep(self, asked: BaseHTTPRequestHandler, body: bytes, status: int | None) -> None:
        address = urlsplit(asked.path)
        found = re.fullmatch(r"/fragments/(\d+)/reports/(\d+)-(\d+)", address.path)
        if asked.command == "PUT" and found:
            name = self.names[asked.headers["authorization"].removeprefix("Bearer ")]
            counts = {key: int(value) for key, value in parse_qsl(address.query)}
            report = Report(island=name, life=int(found[2]), base=int(found[3]), **counts)
            with self.lock:
                self.sent[int(found[1]), name].append(Sent(report, body, status))

    def stored(
        self, k: int, name: str, after: tuple[int, int], last: tuple[int, int]
    ) -> list[Sent]:
        """Return the reports from places above ``after`` up to ``last``, each as the hub has it:
        as it came last. Of one without an answer the hub died perhaps before it said so."""
        found = {
            each.report.place: each
            for each in self.sent[k, name]
            if each.status in (200, None) and after < each.report.place <= last
        }
        return [found[place] for place in sorted(found)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Watch(threading.Thread):
    """Keeps the facts of each version of each fragment, before the hub removes them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory = directory
        self.facts: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        self.seeds: dict[int, np.ndarray] = {}
        self.must_end = threading.Event()

    def run(self) -> None:
        while not self.must_end.wait(0.03):
            self.look()

    def look(self) -> None:
        for path in self.directory.glob("fragment-*/v*/facts"):
            k, version = int(path.parts[-3][-3:]), int(path.parts[-2][1:])
            if version in self.facts[k]:
                continue
            with suppress(FileNotFoundError):
                if version == 0:
                    self.seeds[k] = np.fromfile(path.with_name("published"), np.float32)
                self.facts[k][version] = json.loads(path.read_bytes())


def place_of(report: dict[str, Any]) -> tuple[int, int]:
    return report["life"], report["base"]


def replay(watch: Watch, proxy: Proxy, k: int) -> tuple[list[np.ndarray], list[str]]:
    """Return a fragment's weights in each version, made of the reports that its facts count, each
    once; and what is otherwise at the hub."""
    facts, optimizer, faults = watch.facts[k], OuterOptimizer.of(NESTEROV), list[str]()
    directory = watch.directory / f"fragment-{k:03}"
    weights, momentum, tokens = watch.seeds[k], None, 0
    versions, counted = [weights], set[str]()
    for version in range(1, max(facts) + 1):
        if version not in facts:
            return versions, [f"fragment {k}: version {version} came and went unseen"]
        before, after = facts[version - 1]["counted"], facts[version]["counted"]
        differences = []
        for name in sorted(after):
            first = place_of(before[name]) if name in before else (0, -1)
            kept = proxy.stored(k, name, first, place_of(after[name]))
            counted |= {each.report.file for each in kept}
            tokens += sum(each.report.tokens for each in kept)
            if kept:
                arrays = (np.frombuffer(each.body, np.float32) for each in kept)
                differences.append(reduce(add, arrays))
        mean = weighted_mean(differences, [1] * len(differences), directory)
        weights, momentum = optimizer.step(weights, momentum, mean)
        versions.append(weights)
        if facts[version]["tokens"] != tokens:
            said = facts[version]["tokens"]
            faults.append(f"fragment {k}, version {version}: {said} tokens; reports have {tokens}")
        path = directory / f"v{version:07}" / "published"
        if path.exists() and not np.array_equal(weights, np.fromfile(path, np.float32)):
            faults.append(f"fragment {k}, version {version}: other weights than reports make")
    known = counted | {each.name for each in directory.glob("*.report")}
    for (fragment, _), sent in proxy.sent.items():
        lost = {each.report.file for each in sent if each.status == 200} - known
        if fragment == k and lost:
            faults.append(f"fragment {k}: acknowledged, and lost: {lost}")
    return versions, faults
