"""Values from the output of macOS's and Linux's tools about a machine. No MLX, no MPI.

Every function returns None, or nothing, for an unexpected text. The formats of macOS are from
documentation and recorded outputs, see the tests.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

WIFI = "Wi-Fi"
THUNDERBOLT = "Thunderbolt"
ETHERNET = "Ethernet"
VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True)
class Interface:
    """An IPv4 address of a machine, in a network like 10.25.0.0/24; ``medium`` carries it."""

    name: str
    address: str
    network: str
    medium: str | None = None

    @property
    def is_loopback(self) -> bool:
        return ipaddress.IPv4Address(self.address).is_loopback


def sysctl_values(text: str) -> dict[str, str]:
    """Return the lines ``key: value`` of macOS's ``sysctl KEY ...``."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {key: value.strip() for key, colon, value in pairs if colon}


def chip_by_cpuinfo(text: str) -> str | None:
    """Return the processor of Linux's /proc/cpuinfo."""
    line = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return None if line is None else line[1].strip()


def hardware_ports(text: str) -> dict[str, str]:
    """Return the port of each device in macOS's ``networksetup -listallhardwareports``.

    An example: bridge0 -> Thunderbolt Bridge.
    """
    found = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)$", text, re.MULTILINE)
    return {device: port.strip() for port, device in found}


def medium_of_port(port: str) -> str | None:
    """Return the medium of a hardware port of macOS; None for an unknown one."""
    name = port.casefold()
    if "wi-fi" in name or "airport" in name:
        return WIFI
    if "thunderbolt ethernet" in name or "ethernet" in name or " lan" in name:
        return ETHERNET
    return THUNDERBOLT if "thunderbolt" in name else None


def route_by_bsd(text: str) -> str | None:
    """Return the interface of macOS's ``route -n get ADDRESS``."""
    line = re.search(r"^\s*interface: (\S+)$", text, re.MULTILINE)
    return None if line is None else line[1]


def route_by_ip(text: str) -> str | None:
    """Return the interface of Linux's ``ip route get ADDRESS``."""
    words = text.split()
    if "dev" not in words[:-1]:
        return None
    return words[words.index("dev") + 1]


def firewall_state(text: str) -> str | None:
    """Return ``off``, ``on`` or ``blocks all``: macOS's ``socketfilterfw --getglobalstate``."""
    state = re.search(r"\(State = ([012])\)", text)
    return None if state is None else ("off", "on", "blocks all")[int(state[1])]
