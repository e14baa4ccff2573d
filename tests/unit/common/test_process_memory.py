"""What limits the memory of a process: cgroups of both versions, and the address space."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmlx.common.process_memory import (
    MemoryBound,
    cgroup_bounds,
    peak_resident_bytes,
    resident_bytes,
)
from shardmlx.common.units import GIB, MIB
from tests.helpers.jobs import ROOT


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    return tmp_path / "mounts"


def bounds_of(mounts: Path, cgroup: str) -> list[MemoryBound]:
    (mounts.parent / "cgroup").write_text(cgroup)
    return list(cgroup_bounds(mounts.parent, mounts))


def limit(directory: Path, file: str, content: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / file).write_text(f"{content}\n")


def found(bounds: list[MemoryBound]) -> dict[str, int]:
    return {bound.name: bound.nbytes for bound in bounds}


def test_version_1_counts_every_level_that_has_a_limit(mounts: Path) -> None:
    place = mounts / "memory"
    limit(place, "memory.limit_in_bytes", "9223372036854771712")
    limit(place / "jobs", "memory.limit_in_bytes", str(2 * GIB))
    limit(place / "jobs" / "mine", "memory.limit_in_bytes", str(GIB))
    bounds = bounds_of(mounts, "5:cpu,cpuacct:/jobs\n4:memory:/jobs/mine\n")
    assert found(bounds) == {"cgroup jobs/mine": GIB, "cgroup jobs": 2 * GIB}
    assert {bound.what for bound in bounds} == {"the memory cgroup"}


def test_version_2_writes_max_where_there_is_none(mounts: Path) -> None:
    limit(mounts / "a", "memory.max", str(3 * GIB))
    limit(mounts / "a" / "b", "memory.max", "max")
    assert found(bounds_of(mounts, "0::/a/b\n")) == {"cgroup a": 3 * GIB}


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_a_container_sees_its_own_part_only(mounts: Path, path: str) -> None:
    """Its paths are those of the host, or begin at its own root."""
    limit(mounts / "memory", "memory.limit_in_bytes", str(GIB))
    assert found(bounds_of(mounts, f"4:memory:{path}\n")) == {"cgroup .": GIB}


def test_a_system_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert list(cgroup_bounds(tmp_path)) == []


def test_a_process_knows_what_it_takes() -> None:
    before = resident_bytes()
    assert MIB < before <= peak_resident_bytes()
    # Not from the heap, which may hold what other tests have freed.
    with mmap.mmap(-1, 64 * MIB) as held:
        held.write(os.urandom(64 * MIB))
        assert resident_bytes() > before + 60 * MIB
    assert peak_resident_bytes() > before + 60 * MIB


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS enforces no RLIMIT_AS")
def test_ulimit_v_is_a_limit() -> None:
    limit_kib = 4 << 20
    code = (
        "from shardmlx.common.process_memory import *;"
        "bound = memory_bounds()[-1]; print(bound.what, bound.nbytes, resident_bytes())"
    )
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v {limit_kib}; exec {sys.executable} -c '{code}'"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    what, nbytes, resident = done.stdout.rsplit(" ", 2)
    assert what == "RLIMIT_AS (ulimit -v)"
    # What is mapped and not in memory is gone from it.
    assert int(resident) < int(nbytes) < limit_kib << 10
