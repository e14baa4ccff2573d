"""The networks that Open MPI may use, as it was told. No MLX, no MPI."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

INCLUDE = "OMPI_MCA_btl_tcp_if_include"
"""The variable in which ``mpirun --mca`` has networks or interfaces."""


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
