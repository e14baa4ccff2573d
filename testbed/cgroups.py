"""Cgroups: the kernel counts what a group of processes has, and limits it: memory, or cores."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

_ROOT = Path("/sys/fs/cgroup")


PERIOD = 100_000
"""Microseconds in which a group may use its share of a core."""


@dataclass(frozen=True)
class Cgroup:
    """A cgroup of version 1 or 2, which is there."""

    path: Path

    def command(self, *command: str | Path) -> list[str]:
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"'
        return ["sh", "-c", enter, *map(str, command)]


@dataclass(frozen=True)
class MemoryCgroup(Cgroup):
    """One that counts and limits memory."""

    limit_file: str
    peak_file: str

    @property
    def peak(self) -> int:
        """The most bytes that its processes had, with the files that were read for them."""
        return int((self.path / self.peak_file).read_text())


@contextmanager
def memory_cgroups(names: Sequence[str], nbytes: int) -> Iterator[dict[str, MemoryCgroup]]:
    """Yield a cgroup of ``nbytes`` for each name; skip the test where there can be none."""
    made: dict[str, MemoryCgroup] = {}
    try:
        for name in names:
            made[name] = _make(name)
            (made[name].path / made[name].limit_file).write_text(str(nbytes))
    except OSError as error:
        _remove(made)
        raise SkipTest(f"no memory cgroup can be made: {error}") from None
    try:
        yield made
    finally:
        _remove(made)


@contextmanager
def cpu_cgroups(cores: Mapping[str, float]) -> Iterator[dict[str, Cgroup]]:
    """Yield a cgroup for each name that may use so many cores; skip where there can be none.

    Other work on the machine comes after them.
    """
    made: dict[str, Cgroup] = {}
    try:
        for name, count in cores.items():
            made[name] = Cgroup(_new("cpu", name))
            quota = round(count * PERIOD)
            if _is_version_2():
                (made[name].path / "cpu.max").write_text(f"{quota} {PERIOD}")
                (made[name].path / "cpu.weight").write_text("10000")
            else:
                (made[name].path / "cpu.cfs_period_us").write_text(str(PERIOD))
                (made[name].path / "cpu.cfs_quota_us").write_text(str(quota))
                (made[name].path / "cpu.shares").write_text("100000")
    except OSError as error:
        _remove(made)
        raise SkipTest(f"no CPU cgroup can be made: {error}") from None
    try:
        yield made
    finally:
        _remove(made)


def _is_version_2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def _new(controller: str, name: str) -> Path:
    root = _ROOT if _is_version_2() else _ROOT / controller
    if _is_version_2():
        (_ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
    path = root / f"shardmlx-{uuid.uuid4().hex}-{name}"
    path.mkdir()
    return path


def _make(name: str) -> MemoryCgroup:
    path = _new("memory", name)
    if _is_version_2():
        return MemoryCgroup(path, "memory.max", "memory.peak")
    return MemoryCgroup(path, "memory.limit_in_bytes", "memory.max_usage_in_bytes")


def _remove(cgroups: Mapping[str, Cgroup]) -> None:
    end = time.monotonic() + 10.0
    for cgroup in cgroups.values():
        while (cgroup.path / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        cgroup.path.rmdir()
