"""Files that are on the disk when the call returns, on every kind of disk."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path

import pytest

from shardmlx.common.durable_files import (
    flush_directory,
    flush_to_disk,
    replace_durably,
    write_durably,
)

FULL_SYNC = 51


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``fsync`` was called for, with its size at that time."""
    calls: list[str] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(path.name if path.is_dir() else f"{path.name}: {path.stat().st_size}")

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


def test_a_new_file_is_flushed_after_all_of_it_is_written(
    tmp_path: Path, flushed: list[str]
) -> None:
    write_durably(tmp_path / "a", b"12345")
    assert flushed == ["a: 5"]


def test_a_replaced_name_is_flushed_with_its_directory(tmp_path: Path, flushed: list[str]) -> None:
    (tmp_path / "a").write_bytes(b"old")
    write_durably(tmp_path / "b", b"new")
    replace_durably(tmp_path / "b", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert flushed == ["b: 3", "b: 3", tmp_path.name]


@pytest.mark.parametrize("knows_it", [True, False])
def test_on_a_mac_the_cache_of_the_drive_is_flushed_too_where_it_can_be(
    tmp_path: Path, flushed: list[str], monkeypatch: pytest.MonkeyPatch, knows_it: bool
) -> None:
    full: list[int] = []

    def control(descriptor: int, command: int) -> None:
        full.append(command)
        if not knows_it:  # as network disks
            raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    with (tmp_path / "a").open("wb") as file:
        file.write(b"123")
        flush_to_disk(file)
    assert full == [FULL_SYNC]
    assert flushed == ([] if knows_it else ["a: 3"])


@pytest.mark.parametrize(
    ("number", "is_error"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)]
)
def test_a_disk_that_cannot_flush_directories_is_no_error_but_one_that_fails_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_error: bool
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if is_error:
        with pytest.raises(OSError, match=os.strerror(number)):
            flush_directory(tmp_path)
    else:
        flush_directory(tmp_path)
