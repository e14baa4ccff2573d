"""The memory of this process as the system counts it, and its limits.

No MLX, no MPI. Sources: Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst, and proc(5)
of Linux; getrlimit(2).
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60
"""Bytes that mean no limit: cgroup v1 writes the largest whole number of pages."""


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """Limit of bytes for all processes of a host under the same ``name``, of the kind ``what``."""

    name: str
    nbytes: int
    what: str


def resident_bytes() -> int:
    """Return the bytes of this process in memory: its own, and mapped files."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the most bytes that this process has had in memory since it began."""
    # Linux's getrusage inherits the peak of the process that started this one.
    for line in _text(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def memory_bounds() -> tuple[MemoryBound, ...]:
    """Return the limits of this process's memory, beside the size of the machine."""
    bounds = [*cgroup_bounds()]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    # Memory that is only mapped counts there too; macOS does not enforce it.
    if sys.platform != "darwin" and limit != resource.RLIM_INFINITY:
        memory = psutil.Process().memory_info()
        nbytes = max(1, limit - memory.vms + memory.rss)
        bounds.append(MemoryBound(f"process {os.getpid()}", nbytes, "RLIMIT_AS (ulimit -v)"))
    return tuple(bounds)


def cgroup_bounds(
    proc: Path = Path("/proc/self"), mounts: Path = Path("/sys/fs/cgroup")
) -> Iterator[MemoryBound]:
    """Yield the limits of the memory cgroups, v1 or v2, that the process of ``proc`` is in."""
    for line in _text(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, file = mounts / "memory", "memory.limit_in_bytes"
        elif not controllers:
            mount, file = mounts, "memory.max"
        else:
            continue
        directory = mount / path.lstrip("/")
        if not directory.is_dir():
            directory = mount  # a container sees its own part alone, at the root
        for each in (directory, *directory.parents):
            limit = _text(each / file).strip() if each.is_relative_to(mount) else ""
            if limit.isdecimal() and int(limit) < _UNLIMITED:
                name = str(each.relative_to(mount))
                yield MemoryBound(f"cgroup {name}", int(limit), "the memory cgroup")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
