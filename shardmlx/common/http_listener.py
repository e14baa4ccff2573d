"""Listen for HTTP: a socket, the names by which requests may call it, the headers of answers."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from shardmlx.errors import UserError, one_line, refusing

MILLISECONDS_STALLED = 60_000
"""Milliseconds for which a client may leave sent data unread."""

ANSWERED = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy of the page: nothing runs and nothing is loaded but its own files."""

FOR_PAGE = {**ANSWERED, "cache-control": "no-cache", "content-security-policy": POLICY}
"""Headers of a page and its parts."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

_ELSEWHERE = "192.0.2.1"  # in no own network, by RFC 5737


def bind(host: str, port: int, prefix: str = "--") -> socket.socket:
    """Return a listening socket; port 0 takes any. ``UserError`` names options by ``prefix``."""
    with refusing(f"{prefix}host {host}", "give an address of this machine"):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        return _listening(found[0][0], found[0][4])
    except OSError as error:
        raise _explained(host, port, prefix, error) from None


def bind_both(host: str, port: int, prefix: str = "--") -> list[socket.socket]:
    """Return the socket of ``bind``, for 127.0.0.1 one at ::1 too: Node takes localhost for it."""
    first = bind("127.0.0.1" if host == "localhost" else host, port, prefix)
    address, taken = first.getsockname()[:2]
    if address != "127.0.0.1":
        return [first]
    try:
        return [first, _listening(socket.AF_INET6, ("::1", taken))]
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return [first]
        first.close()
        if port == 0:
            return bind_both(host, port, prefix)
        raise _explained("::1", port, prefix, error) from None


def _listening(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit both, which reveal clients that vanish or stop reading.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, MILLISECONDS_STALLED)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _explained(host: str, port: int, prefix: str, error: OSError) -> UserError:
    return UserError(
        f"{prefix}host {host} {prefix}port {port}: {error.strerror or one_line(error)}",
        "give an address of this machine, and a port from 1024 that is free, or 0 for any",
    )


def source_address(target: str) -> str | None:
    """Return the address from which this machine reaches another. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as test:
        test.connect((target, 9))
        return str(test.getsockname()[0])
    return None


def address_of(listener: socket.socket, *, secure: bool = False) -> str:
    """Return the URL of the server at a socket, as one types it into a browser: where others reach
    it at all addresses, with the one by which this machine reaches them. A ``secure`` one has a
    certificate."""
    scheme = "https" if secure else "http"
    host, port = listener.getsockname()[:2]
    if ip_address(host.partition("%")[0]).is_unspecified:
        host = source_address(_ELSEWHERE) or host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def trusted_hosts(listener: socket.socket, extra: Sequence[str] = ()) -> frozenset[str] | None:
    """Return the names that a request's ``Host`` may have; None for any, where others may ask."""
    host = listener.getsockname()[0]
    is_local = ip_address(host.partition("%")[0]).is_loopback
    return frozenset({*LOOPBACK, host, *map(str.lower, extra)}) if extra or is_local else None


def is_for(host: str, hosts: Collection[str] | None) -> bool:
    """Tell whether ``hosts``, None for any, has a request's ``Host``: prevents DNS rebinding."""
    if hosts is None:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    return name in hosts
