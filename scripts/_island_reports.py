"""A proxy before a hub that keeps the reports of islands, and what a run must have made of them."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import add
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from shardmlx.islands.aggregate import weighted_mean
from shardmlx.islands.outer import NESTEROV, OuterOptimizer
from shardmlx.islands.store import Report


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
            faults.append(f"fragment {k}, version {version}: not {tokens} tokens")
        path = directory / f"v{version:07}" / "published"
        if path.exists() and not np.array_equal(weights, np.fromfile(path, np.float32)):
            faults.append(f"fragment {k}, version {version}: other weights than reports make")
    known = counted | {each.name for each in directory.glob("*.report")}
    for (fragment, _), sent in proxy.sent.items():
        lost = {each.report.file for each in sent if each.status == 200} - known
        if fragment == k and lost:
            faults.append(f"fragment {k}: acknowledged, and lost: {lost}")
    return versions, faults
