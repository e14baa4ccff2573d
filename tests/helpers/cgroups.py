"""Memory cgroups: the kernel counts what a group of processes has, and limits it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryCgroup:
    """A cgroup of version 1 or 2, which is there."""

    path: Path
    limit_file: str
    peak_file: str

    @property
    def peak(self) -> int:
        """The most bytes that its processes had, with the files that were read for them."""
        return int((self.path / self.peak_file).read_text())

    def command(self, *command: str | Path) -> list[str]:
        """Return the command that starts ``command`` in it."""
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"'
        return ["sh", "-c", enter, *map(str, command)]


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
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        yield made
    finally:
        _remove(made)


def _make(name: str) -> MemoryCgroup:
    if (_ROOT / "cgroup.controllers").exists():
        (_ROOT / "cgroup.subtree_control").write_text("+memory")
        cgroup = MemoryCgroup(
            _ROOT / f"shardmlx-{uuid.uuid4().hex}-{name}", "memory.max", "memory.peak"
        )
    else:
        path = _ROOT / "memory" / f"shardmlx-{uuid.uuid4().hex}-{name}"
        cgroup = MemoryCgroup(path, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
    cgroup.path.mkdir()
    return cgroup


def _remove(cgroups: dict[str, MemoryCgroup]) -> None:
    """Remove them, once their last processes have gone."""
    end = time.monotonic() + 10.0
    for cgroup in cgroups.values():
        while (cgroup.path / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        cgroup.path.rmdir()
