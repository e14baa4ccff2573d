"""Facts of this machine for ``shardmlx.doctor``; unknown ones are None.

psutil gives memory and addresses, the system's own tools and files the rest. The formats of macOS's
tools are from documentation and recorded outputs (see the tests).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardmlx.common import mlx_build
from shardmlx.common.process_memory import memory_limit
from shardmlx.common.units import MIB
from shardmlx.distributed.networks import own_addresses
from shardmlx.distributed.processes import find_mpirun
from shardmlx.hosts.mpirun import is_of_wheel
from shardmlx.hosts.probe_script import versions

SECONDS_TO_SAY = 10.0  # for each tool

_ADDED_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"  # may be missing in a login without a terminal

GPUS_OF_DRIVER = Path("/proc/driver/nvidia/gpus")
"""The directory in which NVIDIA's driver on Linux names its GPUs."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A machine, ``node`` for mpirun, as one of its processes sees it. Sizes are in bytes;
    ``wired_limit`` is macOS's setting: 0 if the system decides. ``mlx_libraries`` are the packages
    with a library of MLX for Linux."""

    node: str | None
    system: str
    is_mac: bool
    chip: str | None
    python: str
    versions: Mapping[str, str | None]
    cores: int | None
    memory: int | None
    memory_free: int | None
    wired_limit: int | None
    directory: str | None
    disk_free: int | None
    interfaces: tuple[Interface, ...]
    memory_limit: int | None = None
    has_rdma: bool = False
    mpirun: str | None = None
    mpirun_is_of_wheel: bool = True
    weak_power: tuple[str, ...] = ()
    mlx_libraries: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """System and machine, like ``macOS arm64``."""
        name, *_, machine = self.system.split(" ")
        return f"{name} {machine}"


def collect() -> HostFacts:
    """Ask this machine, and wait at most ``SECONDS_TO_SAY`` for each tool."""
    is_mac = sys.platform == "darwin"
    system, release = platform.system(), platform.release()
    if is_mac:
        system, release = "macOS", platform.mac_ver()[0]
    cores = os.cpu_count() if is_mac else _cores_on_linux()
    limit = _said("sysctl", "-n", "iogpu.wired_limit_mb") if is_mac else ""
    ports = (_said("networksetup", "-listallhardwareports") if is_mac else None) or ""
    medium_of = media_of_ports(ports).get if is_mac else medium_on_linux
    directory, disk_free = _disk()
    memory = psutil.virtual_memory()
    mpirun = _mpirun()
    in_cgroup = memory_limit()
    return HostFacts(
        node=os.environ.get("PMIX_HOSTNAME"),
        system=f"{system} {release} {platform.machine()}",
        is_mac=is_mac,
        chip=_said("sysctl", "-n", "machdep.cpu.brand_string") if is_mac else chip_on_linux(),
        python=sys.executable,
        versions=versions(),
        cores=cores,
        memory=memory.total,
        memory_free=memory.available,
        wired_limit=int(limit) * MIB if limit and limit.isdecimal() else None,
        directory=directory,
        disk_free=disk_free,
        interfaces=tuple(
            Interface(name, str(each.ip), str(each.network), medium_of(name))
            for name, each in own_addresses()
        ),
        memory_limit=in_cgroup if in_cgroup and in_cgroup < memory.total else None,
        has_rdma="rdma_" in ((_said("ibv_devices") if is_mac else None) or ""),
        mpirun=mpirun,
        mpirun_is_of_wheel=mpirun is None or is_of_wheel(Path(mpirun)),
        weak_power=weak_power(_said("pmset", "-g") or "" if is_mac else ""),
        mlx_libraries=tuple(mlx_build.libraries()),
    )


def _cores_on_linux() -> int:
    """Return the cores that this job may use. mpirun binds each of two ranks to one of them, but
    not its daemon, which has started this process."""
    process = os.getppid() if "PMIX_RANK" in os.environ else 0
    return len(os.sched_getaffinity(process))


def facts_from(fields: Any) -> HostFacts | None:
    """Return facts that another host sent as JSON; None if its version has none, or others."""
    with contextlib.suppress(KeyError, TypeError):
        interfaces = tuple(Interface(**each) for each in fields["interfaces"])
        return HostFacts(**{**fields, "interfaces": interfaces})
    return None


def _said(*command: str) -> str | None:
    path = os.pathsep.join(filter(None, [os.environ.get("PATH"), _ADDED_PATH]))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS_TO_SAY,
            env=os.environ | {"PATH": path, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def chip_on_linux(gpus: Path = GPUS_OF_DRIVER) -> str | None:
    """Return the first GPU of NVIDIA's driver, with which MLX computes; else the processor."""
    for facts in sorted(gpus.glob("*/information")):
        with contextlib.suppress(OSError):
            if line := re.search(
                r"^Model:\s*(\S.*)$", facts.read_text(errors="replace"), re.MULTILINE
            ):
                return line[1].strip()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if line := re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE):
            return line[1].strip()
    return platform.processor() or None


def _mpirun() -> str | None:
    """Return the program that started this process: mpirun, or its daemon here."""
    found = find_mpirun()
    with contextlib.suppress(psutil.Error):
        return None if found is None else found.process.exe()
    return None


def weak_power(settings: str) -> tuple[str, ...]:
    """Return what slows this machine down; ``settings`` are those of a Mac, ``pmset -g``."""
    battery = psutil.sensors_battery()
    found = {
        "on battery power": battery is not None and battery.power_plugged is False,
        "in Low Power Mode": re.search(r"^\s*(low)?powermode\s+1\b", settings, re.MULTILINE),
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _disk() -> tuple[str | None, int | None]:
    try:
        directory = os.getcwd()
        return directory, shutil.disk_usage(directory).free
    except OSError:
        return None, None


def media_of_ports(text: str) -> dict[str, str | None]:
    """Return the medium of each device in macOS's ``networksetup -listallhardwareports``."""
    found = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)$", text, re.MULTILINE)
    return {device: _medium(port.casefold()) for port, device in found}


def _medium(port: str) -> str | None:
    if "wi-fi" in port or "airport" in port:
        return WIFI
    if "ethernet" in port or " lan" in port:
        return ETHERNET
    return THUNDERBOLT if "thunderbolt" in port else None


def medium_on_linux(name: str, root: Path = Path("/sys/class/net")) -> str | None:
    """Return the medium of an interface, by the kernel's sysfs; None for a missing one."""
    directory = root / name
    if not directory.exists():
        return None
    if (directory / "wireless").exists() or (directory / "phy80211").exists():
        return WIFI
    if not (directory / "device").exists():
        return VIRTUAL
    driver = (directory / "device" / "driver").resolve().name
    return THUNDERBOLT if driver.startswith("thunderbolt") else ETHERNET
