"""A checkpoint that cannot be written: one message, nobody hangs, and the last one stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from shardmlx.checkpoint import writer
from shardmlx.checkpoint.export import SaveError
from shardmlx.checkpoint.store import Store
from shardmlx.common.durable_files import flush_to_disk
from shardmlx.distributed import byte_stream
from shardmlx.distributed.byte_stream import Outgoing
from tests.helpers.checkpoints import (
    begin,
    complete,
    hosts,
    left_over,
    load,
    on_ranks,
    save,
    search,
    whole,
    writer_on,
)
from tests.helpers.local_transport import LocalTransport

SECOND_FILE = "weights-01.safetensors"


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_stream, "PIECE_BYTES", 64)
    monkeypatch.setattr(writer, "POLL_SECONDS", 0.01)


def fail_to_write(
    patch: pytest.MonkeyPatch, path: Path, number: int = errno.ENOSPC
) -> list[tuple[int, str]]:
    """One file cannot be written; returns the failures that ranks tell of, as they come."""

    def flush(file: IO[bytes]) -> None:
        if Path(file.name) == path:
            raise OSError(number, os.strerror(number), str(path))
        flush_to_disk(file)

    failures: list[tuple[int, str]] = []
    fail = LocalTransport.fail

    def spy(transport: LocalTransport, error: Exception) -> None:
        failures.append((transport.rank, str(error)))
        fail(transport, error)

    patch.setattr(writer, "flush_to_disk", flush)
    patch.setattr(LocalTransport, "fail", spy)
    return failures


@pytest.mark.parametrize(
    ("kind", "seen", "name", "rank"),
    [
        ("shared", "aaa", "weights-00.safetensors", 0),
        ("shared", "aaa", SECOND_FILE, 1),
        ("shared", "aaa", "optimizer-02.safetensors", 2),
        ("rank0", "abc", "weights-00.safetensors", 0),
        ("rank0", "abc", "optimizer-02.safetensors", 0),
        ("neighbour", "abc", SECOND_FILE, 1),
        ("neighbour", "aabb", "weights-02.safetensors", 0),
    ],
)
def test_a_full_disk_ends_the_run_with_one_message_and_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seen: str, name: str, rank: int
) -> None:
    directories = hosts(tmp_path, seen)
    save(directories, kind, len(seen), {1: 1})
    store = Store(directories[rank])
    failures = fail_to_write(monkeypatch, store.partial(2) / name)
    with pytest.raises(SaveError) as failed:
        save(directories, kind, len(seen), {2: 2})
    message = str(failed.value)
    assert message.startswith(f"rank {rank} on localhost, writing the checkpoint of step 2")
    assert f"{store.directory}: the disk is full" in message
    assert failures[0] == (rank, str(failed.value))
    assert all(steps == [1] for steps in complete(directories).values() if steps)
    assert not (store.partial(2) / name).exists(), "there is room again"
    assert load(directories) == whole(len(seen), seed=1)


def test_a_run_goes_on_from_where_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = hosts(tmp_path, "aa")
    with monkeypatch.context() as patch:
        fail_to_write(patch, Store(directories[0]).partial(2) / SECOND_FILE)
        with pytest.raises(SaveError):
            save(directories, "shared", 2, {1: 1, 2: 2, 3: 3})
    save(directories, "shared", 2, {2: 4})
    assert complete(directories) == {"a": [1, 2]}
    assert left_over(directories) == set()
    assert load(directories) == whole(2, seed=4)


def test_any_other_reason_is_told_as_the_system_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = hosts(tmp_path, "a")
    path = Store(directories[0]).partial(1) / "weights-00.safetensors"
    fail_to_write(monkeypatch, path, errno.EIO)
    with pytest.raises(SaveError, match="Input/output error") as failed:
        save(directories, "shared", 1)
    assert str(path) in str(failed.value)


def test_no_rank_frees_its_weights_or_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = hosts(tmp_path, "a")
    fail_to_write(monkeypatch, Store(directories[0]).partial(1) / "weights-00.safetensors")

    def work(transport: LocalTransport, store: Store) -> None:
        writer = writer_on(transport, store, "shared", 1)
        begin(writer, 0, 1, 1)
        steps: list[Callable[[], Any]] = [
            writer.release,
            writer.wait,
            lambda: begin(writer, 0, 1, 2),
        ]
        for step in steps:
            with pytest.raises(SaveError, match="the disk is full"):
                step()

    on_ranks(directories, work)
    assert complete(directories) == {"a": []}


def test_what_is_damaged_on_its_way_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Outgoing._send
    monkeypatch.setattr(Outgoing, "_send", lambda stream, piece: send(stream, piece ^ np.uint8(1)))
    directories = hosts(tmp_path, "ab")
    with pytest.raises(SaveError, match=r"^rank 0 .* damaged from rank 1 on localhost$"):
        save(directories, "rank0", 2)
    assert complete(directories) == {"a": [], "b": []}
    assert not list(Store(directories[0]).partial(1).iterdir())


@pytest.mark.parametrize("failing", ["a", "b", "d", "cd", "bcd", "ac"])
def test_where_some_disks_cannot_complete_it_the_old_or_the_new_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Even where one only is kept: the old one goes when all have the new one."""
    directories = hosts(tmp_path, "abcd")
    save(directories, "neighbour", 4, {1: 1}, keep=1)
    commit = Store.commit

    def commit_on_some(store: Store, manifest: Any) -> None:
        if store.directory.parent.name in failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        commit(store, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", commit_on_some)
        with pytest.raises(SaveError, match="the disk is full"):
            save(directories, "neighbour", 4, {2: 2}, keep=1)
    found, _ = search(directories)
    assert found is not None
    step = found.manifest.step
    assert load(directories) == whole(4, seed=step)
    save(directories, "neighbour", 4, {3: 3}, keep=1)
    assert complete(directories) == {each: [3] for each in "abcd"}
