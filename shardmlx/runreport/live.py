"""Show a running job: its page, its events, and its metrics for Prometheus, over HTTP.

The server runs on threads of the training process, which never waits for them: an event costs it
one JSON line, and only a request costs more. No MLX, no MPI.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from shardmlx.common.http_listener import ANSWERED, address_of, is_for, trusted_hosts
from shardmlx.common.reporter import metrics_line
from shardmlx.errors import UserError
from shardmlx.runreport.metrics_file import MOST_REPORTS, current, halved, read_metrics
from shardmlx.runreport.page import render_page
from shardmlx.runreport.prometheus import Gauges

SECONDS_FOR_A_REQUEST = 20.0
"""Seconds of silence after which a connection is closed."""

SECONDS_TO_WAIT = 10.0
"""Seconds that a page's request for events waits for one."""

SECONDS_OF_A_PAGE = 15.0
"""Seconds since its last request after which a page counts as closed."""

SECONDS_TO_TELL = 1.0
"""Seconds that the end of a run waits for another request of a page."""

SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between the server's checks for its end."""


class _Entry(NamedTuple):
    """An event in the log: its number, from 1 on, whether it is a report, and its JSON."""

    number: int
    is_report: bool
    line: str


class EventLog:
    """The events of a run, each with a number, after which a page asks for more."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._entries: list[_Entry] = []
        self._last = 0
        self._has_ended = False

    def add(self, event: str, line: str) -> None:
        """Add an event; every second report is dropped once there are very many."""
        with self._news:
            if len(self._entries) >= 2 * MOST_REPORTS:
                self._entries = halved(self._entries, lambda each: each.is_report)
            self._last += 1
            self._entries.append(_Entry(self._last, event == "train", line))
            self._news.notify_all()

    def end(self) -> None:
        """Wake all waiting requests: no event will come."""
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def after(self, number: int, patience: float = 0.0) -> tuple[int, list[str], bool]:
        """Return the number of the last event, all events after ``number``, and whether the run has
        ended; wait up to ``patience`` seconds for one."""
        with self._news:
            self._news.wait_for(lambda: self._last > number or self._has_ended, patience)
            first = bisect_right(self._entries, number, key=lambda each: each.number)
            return self._last, [each.line for each in self._entries[first:]], self._has_ended


class LivePage:
    """A server of a run on ``listener``, which it closes at its end.

    If the run resumes, earlier events in ``metrics_file`` are shown too. A listener of this machine
    alone answers only requests for this machine.
    """

    def __init__(self, listener: socket.socket, metrics_file: str | None = None) -> None:
        self.address = address_of(listener)
        self._metrics_file = metrics_file
        self._log = EventLog()
        self._gauges = Gauges()
        self._resuming: list[dict[str, Any]] = []
        self._server = _Server(listener, self._log, self._gauges)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(SECONDS_BETWEEN_LOOKS,),
            name="metrics",
            daemon=True,
        )
        self._thread.start()

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Show an event: a listener of ``Reporter``."""
        line = metrics_line(event, values)
        if event == "start" and values.get("step") and self._metrics_file is not None:
            # Reports after the step from which the run resumes no longer hold.
            with contextlib.suppress(UserError):
                self._resuming = list(read_metrics(self._metrics_file).events)
            self._resuming.append(json.loads(line))
            return
        if event == "resume" and self._resuming:
            for each in current([*self._resuming, json.loads(line)]):
                self._add(each["event"], each, json.dumps(each))
            self._resuming = []
            return
        self._add(event, values, line)

    def _add(self, event: str, values: Mapping[str, Any], line: str) -> None:
        self._gauges.take(event, values)
        self._log.add(event, line)

    def close(self) -> None:
        """Stop answering, once open pages know that the run has ended, or after a second. Hanging
        connections end with the process."""
        self._log.end()
        if time.monotonic() - self._server.asked_at < SECONDS_OF_A_PAGE:
            self._server.has_told_end.wait(SECONDS_TO_TELL)
        threading.Thread(target=self._server.shutdown, daemon=True).start()
        with contextlib.suppress(OSError):  # macOS cannot shut a listener down
            # Otherwise the thread at the socket would keep the port for one more interval.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A server with a thread for each connection."""

    block_on_close = False

    def __init__(self, listener: socket.socket, log: EventLog, gauges: Gauges) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.log = log
        self.gauges = gauges
        self.hosts = trusted_hosts(listener)
        self.identity = secrets.token_hex(8)
        self.asked_at = -math.inf
        self.has_told_end = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client that has left does not matter to the run."""


class _Handler(BaseHTTPRequestHandler):
    """A request: for the page, for events, or for metrics."""

    server: _Server
    server_version = "shardmlx"
    sys_version = ""
    timeout = SECONDS_FOR_A_REQUEST

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not is_for(self.headers.get("host", ""), self.server.hosts):
            self._answer(
                421, "text/plain", b"this page is for its own machine: ask for localhost\n"
            )
        elif url.path == "/":
            self._answer(200, "text/html", _page())
        elif url.path == "/events":
            self._events(url.query)
        elif url.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", self.server.gauges.exposition())
        else:
            self._answer(404, "text/plain", b"there are /, /events and /metrics\n")

    do_HEAD = do_GET

    def _events(self, query: str) -> None:
        """Answer with the events after a number, once there is one; with all for another run's."""
        given = {name: values[0] for name, values in parse_qs(query).items()}
        number = given.get("after", "")
        after = int(number) if number.isascii() and number.isdigit() and len(number) < 16 else 0
        if given.get("run", self.server.identity) != self.server.identity:
            after = 0
        self.server.asked_at = time.monotonic()
        last, lines, has_ended = self.server.log.after(after, SECONDS_TO_WAIT)
        facts = {"run": self.server.identity, "last": last, "ended": has_ended}
        body = f'{json.dumps(facts)[:-1]}, "events": [{", ".join(lines)}]}}'
        self._answer(200, "application/json", body.encode())
        self.server.asked_at = time.monotonic()
        if has_ended:
            self.server.has_told_end.set()

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in ANSWERED.items():
            self.send_header(name, value)
        self.send_header("content-type", f"{kind}; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is the run's."""


@cache
def _page() -> bytes:
    return render_page([], title="shardmlx: a run", is_live=True).encode()
