"""Cgroups: the kernel counts and limits the memory of a group of processes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

from testbed.jobs import patience

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryCgroup:
    """A cgroup of version 1 or 2, which is there; it counts and limits memory."""

    path: Path
    limit_file: str
    peak_file: str

    def command(self, *command: str | Path) -> list[str]:
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"'
        return ["sh", "-c", enter, *map(str, command)]

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


def _is_version_2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def _make(name: str) -> MemoryCgroup:
    root = _ROOT if _is_version_2() else _ROOT / "memory"
    if _is_version_2():
        (_ROOT / "cgroup.subtree_control").write_text("+memory")
    path = root / f"shardmlx-{uuid.uuid4().hex}-{name}"
    path.mkdir()
    if _is_version_2():
        return MemoryCgroup(path, "memory.max", "memory.peak")
    return MemoryCgroup(path, "memory.limit_in_bytes", "memory.max_usage_in_bytes")


def _remove(cgroups: Mapping[str, MemoryCgroup]) -> None:
    end = time.monotonic() + patience(10.0)
    for cgroup in cgroups.values():
        while (cgroup.path / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        cgroup.path.rmdir()
