"""``_late_line.py SECONDS PORT PORT``: pass packets of one interface to the other, so much later.

For kernels without netem. It says "up" once it listens, and ends when its stdin is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Of linux/if_packet.h: with the first header the kernel divides large packets, and adds their
checksums, where they are sent."""

ALL_PROTOCOLS = 3
BUFFERED = 4 << 20


def opened(port: str) -> socket.socket:
    """Return a socket for what comes at an interface, and goes out of it."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        end.setsockopt(SOL_PACKET, option, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERED)
    end.bind((port, ALL_PROTOCOLS))
    return end


def main() -> None:
    delay, ends = float(sys.argv[1]), [opened(port) for port in sys.argv[2:]]
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("up", flush=True)
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = {*select.select([sys.stdin, *ends], (), (), rest)[0]}
        if sys.stdin in readable:
            return
        for end in filter(readable.__contains__, ends):
            waiting.append((time.monotonic() + delay, other[end], end.recv(1 << 17)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, packet = waiting.popleft()
            end.send(packet)


if __name__ == "__main__":
    main()
