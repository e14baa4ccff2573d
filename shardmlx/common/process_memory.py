"""The memory of this process as the system counts it, and its limit.

No MLX, no MPI. Sources: Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst, and proc(5)
of Linux.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60
"""Bytes that mean no limit: cgroup v1 writes the largest whole number of pages."""


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


def memory_limit(
    proc: Path = Path("/proc/self"), mounts: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the least limit of the memory cgroups, v1 or v2, that the process of ``proc`` is in;
    None without any."""
    limits = []
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
                limits.append(int(limit))
    return min(limits, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
