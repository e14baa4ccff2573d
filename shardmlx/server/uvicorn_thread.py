"""Run uvicorn on a thread of its own, on a socket that was bound before."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp

from shardmlx.compat import abort_connections, http_protocol
from shardmlx.errors import UserError, one_line

SECONDS_FOR_HEAD = 20.0
"""Seconds for the head of a request to come, from its first byte."""

SECONDS_KEPT = 75
"""Seconds for which a connection without a request is kept."""

MILLISECONDS_STALLED = 60_000
"""Milliseconds for which a client may leave unread what it was sent."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine on itself."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; port 0 is any that is free.

    It listens at once, so that no other server can take the port; clients that connect wait until
    ``HttpServer`` has started. Raises ``UserError`` where that is not possible.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host}: {one_line(error)}", "give an address of this machine"
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit both: a client that vanished or reads nothing is noticed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, MILLISECONDS_STALLED)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _explained(host, port, error) from None
    return listener


def _explained(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"--port {port} of {host} is taken", "give another, or 0 for any that is free"
        )
    if error.errno == errno.EACCES:
        return UserError(f"--port {port} is for the system's own services", "give one from 1024")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(
            f"--host {host} is no address of this machine", "give one, or 0.0.0.0 for all"
        )
    return UserError(f"--host {host} --port {port}: {error.strerror or one_line(error)}")


def address_of(listener: socket.socket) -> str:
    """Return the URL of the server at a socket, as one types it into a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def trusted_hosts(listener: socket.socket, extra: Sequence[str] = ()) -> frozenset[str] | None:
    """Return the names that a request's ``Host`` may have; None for any.

    Where only this machine reaches the server, they are this machine's own and ``extra``. Else they
    are any, unless there are ``extra``.
    """
    host = listener.getsockname()[0]
    if ip_address(host.partition("%")[0]).is_loopback:
        return frozenset({*LOOPBACK, host, *extra})
    return frozenset({*LOOPBACK, host, *extra}) if extra else None


class HttpServer:
    """A server of ``app`` on ``listener``, which it closes at its end.

    ``on_end`` is called on the server's thread when that ends; its argument is the error that ended
    it, or None after ``stop``.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        access_log: bool = False,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.address = address_of(listener)
        self._listener = listener
        self._on_end = on_end
        if access_log:
            _log_access()
        config = uvicorn.Config(
            app,
            http=http_protocol(SECONDS_FOR_HEAD),
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level=None if access_log else "warning",
            access_log=access_log,
            proxy_headers=False,
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
        """Take no more connections, and end after the open requests, or after ``seconds``. A second
        call does nothing."""
        self._server.grace = seconds
        self._server.should_exit = True
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """True while the server's thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            asyncio.run(self._server.serve([self._listener]))
        except BaseException as error:
            ended_by = error
        finally:
            self._listener.close()
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


def _log_access() -> None:
    """Have uvicorn write a line for each request to stderr."""
    for name in ("uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if name == "uvicorn.access" else logging.WARNING)
        if name == "uvicorn.access" and not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False
