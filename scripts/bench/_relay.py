"""``_relay.py PORT HOST PORT SECONDS``: make a connection's bytes arrive so late, both ways.

For kernels without netem. It sleeps between messages, and is woken before anything else, where
the system allows that: ranks leave it no core.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

OWN = 60e-6
"""Seconds that a message takes through this program without a delay, on the benchmarks' machine:
it adds no less."""


def connected(address: tuple[str, int]) -> socket.socket:
    """Return a connection to a program that may not listen yet."""
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)


def relay(ends: tuple[socket.socket, socket.socket], delay: float) -> None:
    """Pass on what comes from each end to the other, until one closes."""
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        rest = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        readable, _, _ = select.select(ends, (), (), rest)
        for end in readable:
            data = end.recv(1 << 20)
            if not data:
                return
            waiting.append((time.perf_counter() + delay - OWN, other[end], data))
        while waiting and waiting[0][0] <= time.perf_counter():
            _, end, data = waiting.popleft()
            end.sendall(data)


def main() -> None:
    port, host, host_port, delay = sys.argv[1:]
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with socket.create_server(("127.0.0.1", int(port))) as listener:
        near, _ = listener.accept()
    with near, connected((host, int(host_port))) as far:
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            relay((near, far), float(delay))


if __name__ == "__main__":
    main()
