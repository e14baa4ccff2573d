"""What limits the memory of a process: cgroups of both versions."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from shardmlx.common.process_memory import (
    memory_limit,
    peak_resident_bytes,
    resident_bytes,
)
from shardmlx.common.units import GIB, MIB


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    return tmp_path / "mounts"


def limit_of(mounts: Path, cgroup: str) -> int | None:
    (mounts.parent / "cgroup").write_text(cgroup)
    return memory_limit(mounts.parent, mounts)


def limit(directory: Path, file: str, content: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / file).write_text(f"{content}\n")


def test_version_1_takes_the_least_limit_of_all_levels(mounts: Path) -> None:
    place = mounts / "memory"
    limit(place, "memory.limit_in_bytes", "9223372036854771712")
    limit(place / "jobs", "memory.limit_in_bytes", str(GIB))
    limit(place / "jobs" / "mine", "memory.limit_in_bytes", str(2 * GIB))
    assert limit_of(mounts, "5:cpu,cpuacct:/jobs\n4:memory:/jobs/mine\n") == GIB


def test_version_2_writes_max_where_there_is_none(mounts: Path) -> None:
    limit(mounts / "a", "memory.max", str(3 * GIB))
    limit(mounts / "a" / "b", "memory.max", "max")
    assert limit_of(mounts, "0::/a/b\n") == 3 * GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_a_container_sees_its_own_part_only(mounts: Path, path: str) -> None:
    """Its paths are those of the host, or begin at its own root."""
    limit(mounts / "memory", "memory.limit_in_bytes", str(GIB))
    assert limit_of(mounts, f"4:memory:{path}\n") == GIB


def test_a_system_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None


def test_a_process_knows_what_it_takes() -> None:
    before = resident_bytes()
    assert MIB < before <= peak_resident_bytes()
    # Not from the heap, which may hold what other tests have freed.
    with mmap.mmap(-1, 64 * MIB) as held:
        held.write(os.urandom(64 * MIB))
        assert resident_bytes() > before + 60 * MIB
    assert peak_resident_bytes() > before + 60 * MIB
