"""uvicorn in a thread of its own, on a socket that was bound before. Pure."""

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
"""Within which a connection must have sent the head of its next request, once it began to."""

SECONDS_KEPT = 75
"""That a connection without a request is kept."""

MILLISECONDS_STALLED = 60_000
"""That a client may leave what it was sent unread."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any that is free. ``UserError``.

    It listens at once, so that no other server can have the port once this one has got it; who
    connects waits until ``HttpServer`` has started.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host}: {one_line(error)}: give an address of this machine"
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
        raise UserError(_explained(host, port, error)) from None
    return listener


def _explained(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port} of {host} is taken: give another, or 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"--port {port} is for the system's own services: give one from 1024"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine: give one, or 0.0.0.0 for all"
    return f"--host {host} --port {port}: {error.strerror or one_line(error)}"


def address_of(listener: socket.socket) -> str:
    """What to type into a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def trusted_hosts(listener: socket.socket, extra: Sequence[str] = ()) -> frozenset[str] | None:
    """Names by which requests may call the server: this machine's own and ``extra`` where only
    this machine reaches it, else any (None) unless there are ``extra``."""
    host = listener.getsockname()[0]
    if ip_address(host.partition("%")[0]).is_loopback:
        return frozenset({*LOOPBACK, host, *extra})
    return frozenset({*LOOPBACK, host, *extra}) if extra else None


class HttpServer:
    """Serves ``app`` on ``listener``, which it closes in the end.

    ``on_end`` is called on the server's thread when that ends, with what ended it if it was not
    ``stop``.
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
        """Returns once requests are answered."""
        self._thread.start()
        self._server.has_started.wait()

    def stop(self, seconds: float) -> None:
        """Take no more connections, give the open requests so long, and end. Twice is once."""
        self._server.grace = seconds
        self._server.should_exit = True
        self._thread.join()

    @property
    def is_alive(self) -> bool:
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
    """To stderr, a line for each request."""
    for name in ("uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if name == "uvicorn.access" else logging.WARNING)
        if name == "uvicorn.access" and not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False
