"""Run uvicorn on a thread of its own, on a socket that was bound before."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from shardmlx.common.http_listener import address_of
from shardmlx.compat import abort_connections, http_protocol

SECONDS_FOR_HEAD = 20.0
"""Seconds for the head of a request to come, from its first byte."""

SECONDS_KEPT = 75
"""Seconds for which a connection without a request is kept."""


class HttpServer:
    """A server of ``app`` on ``listeners``, which it closes at its end. Then its thread calls
    ``on_end`` with the error that ended it, or None after ``stop``. ``no_http`` is the JSON that
    answers what is not HTTP; a PEM file with ``certificate`` and key makes it HTTPS. Requests
    beyond ``most_connections`` get 503."""

    def __init__(
        self,
        app: ASGIApp,
        *listeners: socket.socket,
        no_http: Mapping[str, Any],
        certificate: str | None = None,
        most_connections: int | None = None,
        access_log: bool = False,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.address = address_of(listeners[0], secure=certificate is not None)
        self._listeners = listeners
        self._on_end = on_end
        if access_log:
            logging.basicConfig(format="%(asctime)s %(message)s")
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        config = uvicorn.Config(
            app,
            http=http_protocol(SECONDS_FOR_HEAD, json.dumps(no_http).encode()),
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level=None if access_log else "warning",
            access_log=access_log,
            proxy_headers=False,
            ssl_certfile=certificate,
            limit_concurrency=most_connections,
            server_header=False,
            timeout_keep_alive=SECONDS_KEPT,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Start the thread, and return once requests are answered."""
        self._thread.start()
        self._server.has_started.wait()

    def stop(self, seconds: float) -> None:
        """Take no more connections, and end after the open requests, or after ``seconds``."""
        self._server.grace = seconds
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            asyncio.run(self._server.serve([*self._listeners]))
        except BaseException as error:
            ended_by = error
        finally:
            for listener in self._listeners:
                listener.close()
            self._server.has_started.set()
            self._on_end(ended_by)


class _Server(uvicorn.Server):
    """A server that says when it has started, and gives open requests ``grace`` seconds."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = threading.Event()
        self.grace = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn would cancel what is left, and log a traceback for each.
        asyncio.get_running_loop().call_later(self.grace, abort_connections, self)
        await super().shutdown(sockets)
