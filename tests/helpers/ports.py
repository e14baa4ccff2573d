"""Ports at which nobody listens."""

from __future__ import annotations

import errno
import random
import socket

# The system gives out none of these by itself, neither to a listener at port 0 nor to a client.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port that is free at every address, and stays free unless a test asks for it."""
    # Tests seed the common generator: two processes would try the same ports.
    system = random.SystemRandom()
    while True:
        port = system.choice(PORTS)
        if all(_is_free(family, port) for family in (socket.AF_INET, socket.AF_INET6)):
            return port


def _is_free(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family) as listener:
            listener.bind(("", port))
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True
