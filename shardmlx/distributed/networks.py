"""The networks of this machine, and those that Open MPI may use. No MLX, no MPI."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil

INCLUDE = "OMPI_MCA_btl_tcp_if_include"
"""The variable in which ``mpirun --mca`` has networks or interfaces."""

LOOPBACK = "127.0.0.0/8"
"""The network that Open MPI leaves out by itself, unless it is told which ones to leave out."""


def is_included(name: str, address: str, include: str | None) -> bool:
    """Tell whether ``include``, a value of that variable, has an interface, by its name or its
    address; without one, all are included."""
    if not include:
        return True
    for word in include.split(","):
        with suppress(ValueError):
            if ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False):
                return True
        if word == name:
            return True
    return False


def own_addresses() -> Iterator[tuple[str, ipaddress.IPv4Interface]]:
    """Yield this machine's interfaces by name, each with an address in its network."""
    for label, addresses in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 is a second address of eth0
        for each in addresses:
            if each.family == socket.AF_INET and each.netmask:
                yield name, ipaddress.IPv4Interface(f"{each.address}/{each.netmask}")
