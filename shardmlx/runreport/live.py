"""Show a running job over HTTP: its page, its events, and its newest numbers for Prometheus.

The server runs on threads of the training process, which never waits for them: an event costs it
one JSON line, and only a request costs more. No MLX, no MPI.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardmlx.common.http_listener import ANSWERED, address_of, is_for, trusted_hosts
from shardmlx.common.reporter import finite
from shardmlx.errors import UserError
from shardmlx.runreport.metrics_file import Event, MetricsFile, current
from shardmlx.runreport.page import render_page
from shardmlx.runreport.prometheus import CONTENT_TYPE, RunMetrics
from shardmlx.runreport.thinning import MOST, thinned

SECONDS_FOR_A_REQUEST = 20.0
"""Seconds of silence after which a connection is closed."""

SECONDS_TO_WAIT = 10.0
"""Seconds that a page's request for events waits for one."""

SECONDS_OF_A_PAGE = 15.0
"""Seconds since its last request after which a page counts as closed."""

SECONDS_TO_TELL = 1.0
"""Seconds that the end of a run waits for another request of a page."""


class EventLog:
    """The events of a run, numbered from 1 on. Its ``identity`` changes when earlier ones do."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._has_ended = False
        self.begin_anew([])

    def begin_anew(self, events: Iterable[Event]) -> None:
        """Put these events in the place of all that were there, as many as a page shows."""
        with self._news:
            self.events = thinned(events)
            self._thins_at = 2 * len(self.events) + MOST
            self.identity = secrets.token_hex(8)
            self._news.notify_all()

    def add(self, event: Event) -> None:
        """Add an event. Once there are many more than a page shows, these alone are kept."""
        with self._news:
            self.events.append(event)
            self._news.notify_all()
        if len(self.events) > self._thins_at:
            self.begin_anew(self.events)

    def end(self) -> None:
        """Tell all who wait that no more events come."""
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def after(self, number: int, run: str | None = None, patience: float = 0.0) -> dict[str, Any]:
        """Return events after ``number``, all if of another ``run``; wait ``patience`` for one."""
        with self._news:
            run = run or self.identity
            self._news.wait_for(
                lambda: len(self.events) > number or self._has_ended or run != self.identity,
                patience,
            )
            return {
                "run": self.identity,
                "last": len(self.events),
                "ended": self._has_ended,
                "events": self.events[number if run == self.identity else 0 :],
            }


class LivePage:
    """A server of a run on ``listener``, which it closes; one for this machine alone answers no
    other. If the run resumes, earlier events in ``metrics_file`` are shown too."""

    def __init__(self, listener: socket.socket, metrics_file: str | None = None) -> None:
        self.address = address_of(listener)
        self._metrics_file = metrics_file
        self._log = EventLog()
        self._metrics = RunMetrics()
        self._server = _Server(listener, self._log, self._metrics)
        # Once a second it looks whether it shall end.
        serve = functools.partial(self._server.serve_forever, 1.0)
        threading.Thread(target=serve, name="page", daemon=True).start()

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Show an event: a listener of ``Reporter``."""
        if event == "start" and values.get("step") and self._metrics_file is not None:
            with contextlib.suppress(UserError):
                self._log.begin_anew(MetricsFile(self._metrics_file))
        self._log.add({"event": event, **finite(values)})
        self._metrics.take(event, values)
        if event == "resume":
            # Reports after the step from which the run resumes no longer hold.
            self._log.begin_anew(current(self._log.events))

    def close(self) -> None:
        """Stop once open pages know the end, or after a second. Hanging connections stay."""
        self._log.end()
        if time.monotonic() - self._server.asked_at < SECONDS_OF_A_PAGE:
            self._server.has_told_end.wait(SECONDS_TO_TELL)
        threading.Thread(target=self._server.shutdown, daemon=True).start()
        with contextlib.suppress(OSError):  # macOS cannot shut a listener down
            # Otherwise the thread at the socket would keep the port for one more interval.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    block_on_close = False

    def __init__(self, listener: socket.socket, log: EventLog, metrics: RunMetrics) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.log = log
        self.metrics = metrics
        self.hosts = trusted_hosts(listener)
        self.page = render_page([], title="shardmlx: a run", is_live=True).encode()
        self.asked_at = -math.inf
        self.has_told_end = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client that has left does not matter to the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "shardmlx"
    sys_version = ""
    timeout = SECONDS_FOR_A_REQUEST

    def do_GET(self) -> None:
        """Answer with the page, with its events, or with numbers for Prometheus."""
        url = urlsplit(self.path)
        if not is_for(self.headers.get("host", ""), self.server.hosts):
            self._answer(
                421, "text/plain", b"this page is for its own machine: ask for localhost\n"
            )
        elif url.path == "/":
            self._answer(200, "text/html", self.server.page)
        elif url.path == "/events":
            self._events(url.query)
        elif url.path == "/metrics":
            self._answer(200, CONTENT_TYPE, self.server.metrics.text())
        else:
            self._answer(404, "text/plain", b"there are /, /events and /metrics\n")

    do_HEAD = do_GET

    def _events(self, query: str) -> None:
        """Answer with the events after a number, once there is one; with all for another run's."""
        given = {name: values[0] for name, values in parse_qs(query).items()}
        number = given.get("after", "")
        after = int(number) if number.isascii() and number.isdigit() and len(number) < 16 else 0
        self.server.asked_at = time.monotonic()
        answer = self.server.log.after(after, given.get("run"), SECONDS_TO_WAIT)
        self._answer(200, "application/json", json.dumps(answer).encode())
        self.server.asked_at = time.monotonic()
        if answer["ended"]:
            self.server.has_told_end.set()

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in ANSWERED.items():
            self.send_header(name, value)
        whole = kind if "charset" in kind else f"{kind}; charset=utf-8"
        self.send_header("content-type", whole)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is the run's."""
