"""Files that are on the disk when the call returns, on every kind of disk."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.durable_files import (
    DirectoryLock,
    NewFiles,
    flush_directory,
    flush_to_disk,
    replace_durably,
    why_not_written,
    write_durably,
)
from shardmlx.errors import UserError

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


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_new_files_get_their_names_together_and_in_order_once_they_are_flushed(
    tmp_path: Path, flushed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"old")
    files = NewFiles(tmp_path)
    files.write("b", [b"12", memoryview(b"34")])
    files.write("a", iter([b"new"]))
    assert content(tmp_path) == {"a": b"old", "partial-b": b"1234", "partial-a": b"new"}
    assert flushed == ["partial-b: 4", "partial-a: 3"]
    renamed = []
    replace = os.replace

    def spy(source: Path, target: Path) -> None:
        renamed.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    files.publish()
    assert renamed == ["b", "a"]
    assert flushed[2:] == 2 * [tmp_path.name]
    assert content(tmp_path) == {"a": b"new", "b": b"1234"}


def test_discarded_files_leave_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    files = NewFiles(tmp_path)
    files.write("b", [b"1"])
    with pytest.raises(OSError, match="No such file"):
        files.write("no/such", [b"1"])
    assert files.at_work_on == tmp_path / "no/such"
    assert files.discard()
    assert content(tmp_path) == {"a": b"old"}


def test_files_that_have_their_names_are_not_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = NewFiles(tmp_path)
    for name in ("a", "b"):
        files.write(name, [b"new"])
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError):
        files.publish()
    assert not files.discard()
    assert (tmp_path / "partial-b").read_bytes() == b"new"


def test_of_two_that_write_at_a_time_the_second_is_refused_and_the_first_is_whole(
    tmp_path: Path,
) -> None:
    first, second = NewFiles(tmp_path), NewFiles(tmp_path)
    first.write("weights", [b"of the first"])
    with pytest.raises(BlockingIOError) as refused:
        second.write("weights", [b"of the second"])
    assert "another process" in why_not_written(refused.value, tmp_path, 1)
    assert second.discard()
    first.write("config", [b"of the first"])
    first.publish()
    assert content(tmp_path) == {"weights": b"of the first", "config": b"of the first"}
    second.write("config", [b"of the second"])
    assert second.discard()
    NewFiles(tmp_path).write("config", [b"of a third"])


REFUSAL = UserError("another run")


def test_a_directory_has_one_owner_at_a_time_and_nothing_is_left_of_its_lock(
    tmp_path: Path,
) -> None:
    lock = DirectoryLock(tmp_path, REFUSAL)
    with pytest.raises(UserError, match=REFUSAL.problem):
        DirectoryLock(tmp_path, REFUSAL)
    lock.release()
    assert content(tmp_path) == {}
    following = DirectoryLock(tmp_path, REFUSAL)
    lock.release()
    with pytest.raises(UserError, match=REFUSAL.problem):
        DirectoryLock(tmp_path, REFUSAL)
    following.release()


def test_a_lock_of_a_file_that_its_run_has_just_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = DirectoryLock(tmp_path, REFUSAL)
    flock = fcntl.flock

    def end_first(*arguments: Any) -> None:
        ending.release()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", end_first)
    lock = DirectoryLock(tmp_path, REFUSAL)
    monkeypatch.undo()
    with pytest.raises(UserError, match=REFUSAL.problem):
        DirectoryLock(tmp_path, REFUSAL)
    lock.release()


@pytest.mark.parametrize(
    ("number", "what"),
    [(errno.ENOSPC, "disk"), (errno.EDQUOT, "quota"), (errno.EROFS, "Read-only")],
)
def test_a_full_disk_is_told_with_its_space(tmp_path: Path, number: int, what: str) -> None:
    why = why_not_written(OSError(number, os.strerror(number)), tmp_path, 3 << 20)
    assert what in why
    assert ("3.0 MiB" in why) == (number != errno.EROFS)
