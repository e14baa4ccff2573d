"""Lines on which bytes arrive late, for kernels without netem.

They lie between hosts, in a single connection, or between islands and a hub.

``delays.py line SECONDS PORT PORT`` passes packets of one interface to the other, so much later. It
says "up" once it listens, and ends when its stdin is closed.

``delays.py relay PORT HOST PORT SECONDS`` makes a connection's bytes arrive so late, both ways. It
sleeps between messages, and is woken before anything else, where the system allows that: ranks
leave it no core.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Of linux/if_packet.h: with the first header the kernel divides large packets, and adds their
checksums, where they are sent."""

ALL_PROTOCOLS = 3
RECEIVED = 4 << 20

OWN = 60e-6
"""Seconds that a message takes through a relay without a delay, on the benchmarks' machine: it adds
no less."""


def command(kind: str, *arguments: object) -> list[str]:
    """Return the command of a ``line`` or a ``relay``."""
    return [sys.executable, str(Path(__file__).resolve()), kind, *map(str, arguments)]


def come_first() -> None:
    """Let this process be woken before all others, where the system allows that."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def opened(port: str) -> socket.socket:
    """Return a socket for what comes at an interface, and goes out of it."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        end.setsockopt(SOL_PACKET, option, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED)
    end.bind((port, ALL_PROTOCOLS))
    return end


def pass_packets(delay: str, *ports: str) -> None:
    """Pass packets on until stdin is closed."""
    seconds = float(delay)
    ends = [opened(port) for port in ports]
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    come_first()
    print("up", flush=True)
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = {*select.select([sys.stdin, *ends], (), (), rest)[0]}
        if sys.stdin in readable:
            return
        for end in filter(readable.__contains__, ends):
            waiting.append((time.monotonic() + seconds, other[end], end.recv(1 << 17)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, packet = waiting.popleft()
            end.send(packet)


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


def relay_one(port: str, host: str, host_port: str, delay: str) -> None:
    """Relay the connection that comes to a port to one of a host."""
    come_first()
    with socket.create_server(("127.0.0.1", int(port))) as listener:
        near, _ = listener.accept()
    with near, connected((host, int(host_port))) as far:
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            relay((near, far), float(delay))


# Between islands and a hub

PIECE = 16 << 10
BUFFERED = 16
"""Pieces that may be on their way."""

UP, DOWN = "up", "down"


class SlowLink:
    """Listens at ``port`` for connections to a port of this machine, which share the link.
    ``bytes`` has what went each way. A new connection takes as long as there and back."""

    def __init__(self, to: int, rate: float, delay: float) -> None:
        self.bytes: Counter[str] = Counter()
        self._to, self._rate, self._delay = to, rate, delay
        self._free = {UP: 0.0, DOWN: 0.0}
        self._loop = asyncio.new_event_loop()
        listening = asyncio.start_server(self._relay, "127.0.0.1", 0)
        server = self._loop.run_until_complete(listening)
        self.port: int = server.sockets[0].getsockname()[1]
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _relay(self, near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self._delay)
        far, forward = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._pump(UP, near, forward), self._pump(DOWN, far, answer))

    async def _pump(self, way: str, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        """Send what comes as fast as the link has room, and let it arrive late."""
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BUFFERED)
        arriving = asyncio.create_task(self._arrive(late, to))
        data = b"\0"
        while data:
            try:
                data = await source.read(PIECE)
            except ConnectionError:
                data = b""
            self.bytes[way] += len(data)
            now = self._loop.time()
            self._free[way] = sent = max(now, self._free[way]) + len(data) / self._rate
            await asyncio.sleep(sent - now)
            await late.put((sent + self._delay, data))
        await arriving

    async def _arrive(
        self, late: asyncio.Queue[tuple[float, bytes]], to: asyncio.StreamWriter
    ) -> None:
        data = b"\0"
        while data:
            at, data = await late.get()
            await asyncio.sleep(at - self._loop.time())
            with suppress(ConnectionError):
                to.write(data)
                await to.drain()
        to.close()


KINDS: dict[str, Callable[..., None]] = {"line": pass_packets, "relay": relay_one}

if __name__ == "__main__":
    KINDS[sys.argv[1]](*sys.argv[2:])
