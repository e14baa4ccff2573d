"""What some ranks save, on whatever disks, any others read again, to the bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from safetensors import safe_open

from shardmlx.checkpoint import writer
from shardmlx.checkpoint.export import SaveError
from shardmlx.checkpoint.store import Store
from shardmlx.checkpoint.writer import Saved, Snapshot
from shardmlx.common.environment import LAUNCHED, SAVED
from shardmlx.distributed import byte_stream
from shardmlx.distributed.messages import PeerLost, buffer_of
from tests.helpers.checkpoints import (
    as_bytes,
    begin,
    complete,
    hosts,
    left_over,
    load,
    manifest_of,
    on_ranks,
    save,
    snapshots,
    tensors_of,
    whole,
    writer_on,
)
from tests.helpers.local_transport import LocalTransport
from tests.helpers.models_and_batches import load_arrays


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_stream, "PIECE_BYTES", 64)
    monkeypatch.setattr(writer, "POLL_SECONDS", 0.01)


def test_a_snapshot_is_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = tensors_of(0)
    snapshot = Snapshot.of("weights-00.safetensors", tensors)
    content = b"".join(snapshot.pieces())
    assert len(content) == snapshot.nbytes
    path = tmp_path / snapshot.name
    path.write_bytes(content)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(tensors)
    assert as_bytes(load_arrays(path)) == as_bytes(tensors)


def test_a_snapshot_takes_no_memory_of_its_own() -> None:
    weights = {"a": mx.random.normal((64, 64)), "b": mx.random.normal((64,))}
    mx.eval(weights)
    before = mx.get_active_memory()
    snapshot = Snapshot.of("weights-00.safetensors", weights)
    assert mx.get_active_memory() == before
    for array, weight in zip(snapshot.arrays, weights.values(), strict=True):
        buffer_of(weight)[0] ^= 1
        assert as_bytes({"": array}) == as_bytes({"": weight})


WRITTEN = [
    (kind, seen, owners)
    for kind, layouts in {
        "shared": ["a", "aa", "aaa", "aaaa"],
        "rank0": ["a", "aaa", "ab", "aba", "abcd", "aabb"],
        "neighbour": ["ab", "aba", "abc", "abcd", "aabb", "abab", "abbacb"],
    }.items()
    for seen in layouts
    for owners in sorted({1, len(seen) // 2 or 1, min(4, len(seen))})
]


@pytest.mark.parametrize(("kind", "seen", "owners"), WRITTEN)
def test_what_is_written_is_read_by_any_other_ranks_on_any_disks(
    tmp_path: Path, kind: str, seen: str, owners: int
) -> None:
    written = hosts(tmp_path, seen)
    save(written, kind, owners)
    disks = "".join(sorted(set(seen)))
    for number, ranks in enumerate([disks, disks + "yz", "z" + disks[::-1], seen[::-1]]):
        read = hosts(tmp_path, ranks)
        assert load(read) == whole(owners), ranks
        assert left_over(read) == set(), number


def test_two_saves_need_no_pause_and_only_so_many_stay(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "abc")
    save(directories, "neighbour", 3, {1: 1, 2: 2, 3: 3, 4: 4}, keep=2)
    assert complete(directories) == {"a": [3, 4], "b": [3, 4], "c": [3, 4]}
    assert load(directories, 3) == whole(3, seed=3)
    assert load(directories) == whole(3, seed=4)


def test_a_launch_elsewhere_is_told_of_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "nowhere" / "status"
    monkeypatch.setenv(LAUNCHED, str(mark))
    save(hosts(tmp_path, "ab"), "rank0", 2, [100, 200])
    assert capsys.readouterr().out == 2 * f"{mark} {SAVED}\n"


def test_rank_0_tells_what_was_completed_once(tmp_path: Path) -> None:
    def work(transport: LocalTransport, store: Store) -> list[Saved | None]:
        writer = writer_on(transport, store, "neighbour", 2)
        writer.release()  # nothing is held yet
        writer.wait()
        begin(writer, transport.rank, 2, 5)
        writer.wait()
        return [writer.take_saved(), writer.take_saved()]

    (saved, again), *others = on_ranks(hosts(tmp_path, "abc"), work)
    assert again is None
    assert others == [[None, None]] * 2
    assert saved.step == 5
    assert 0 <= saved.seconds < 20
    assert saved.nbytes == sum(each.nbytes for owner in (0, 1) for each in snapshots(owner))


class _Gate:
    """Holds a method of a store up until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        self._open = threading.Event()
        self._real = getattr(Store, method)
        patch.setattr(Store, method, lambda store, *args: self.come(store, *args))

    def come(self, store: Store, *args: Any) -> Any:
        assert self._open.wait(20)
        return self._real(store, *args)

    def open(self) -> None:
        self._open.set()


def test_weights_are_held_until_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _Gate(monkeypatch, "begin")
    events: list[str] = []

    def open_gate() -> None:
        events.append("writing begins")
        gate.open()

    def work(transport: LocalTransport, store: Store) -> None:
        writer = writer_on(transport, store, "shared", 1)
        begin(writer, 0, 1, 1)
        (thread,) = (each for each in threading.enumerate() if each.name == "checkpoint")
        assert thread.daemon  # a process that ends waits for no disk
        threading.Timer(0.1, open_gate).start()
        writer.release()
        events.append("weights may change")
        writer.wait()

    on_ranks(hosts(tmp_path, "a"), work)
    assert events == ["writing begins", "weights may change"]


def test_a_wait_for_a_slow_disk_ends_with_the_loss_of_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _Gate(monkeypatch, "begin")

    def work(transport: LocalTransport, store: Store) -> None:
        writer = writer_on(transport, store, "shared", 1)
        begin(writer, 0, 1, 1)
        transport.fail(PeerLost("rank 1 on mac-b died"))
        for wait in (writer.release, writer.wait):
            with pytest.raises(PeerLost, match="rank 1 on mac-b died"):
                wait()
        gate.open()

    on_ranks(hosts(tmp_path, "a"), work)


def test_a_slow_disk_has_twelve_hours(tmp_path: Path) -> None:
    def work(transport: LocalTransport, store: Store) -> list[float]:
        limits: list[float] = []

        class Watched(Store):
            def begin(self, step: int) -> Path:
                limits.append(transport.patience)
                return super().begin(step)

        writer = writer_on(transport, Watched(store.directory), "shared", 1)
        begin(writer, 0, 1, 1)
        writer.wait()
        return limits

    assert on_ranks(hosts(tmp_path, "a"), work) == [[43200.0]]


def test_two_ranks_that_write_one_file_otherwise_complete_no_checkpoint(tmp_path: Path) -> None:
    def work(transport: LocalTransport, store: Store) -> None:
        writer = writer_on(transport, store, "rank0", 2)
        parts = [Snapshot.of("weights-00.safetensors", tensors_of(transport.rank))]
        writer.start(manifest_of(1) if transport.rank == 0 else None, 1, parts)
        writer.wait()

    directories = hosts(tmp_path, "ab")
    with pytest.raises(SaveError, match=r"two copies of weights-00.safetensors differ"):
        on_ranks(directories, work)
    assert complete(directories) == {"a": [], "b": []}


@pytest.mark.parametrize(("kind", "seen"), [("shared", "aa"), ("rank0", "ab"), ("neighbour", "ab")])
def test_weights_may_change_once_they_are_released_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seen: str
) -> None:
    gate = _Gate(monkeypatch, "commit")

    def work(transport: LocalTransport, store: Store) -> None:
        writer = writer_on(transport, store, kind, 2)
        parts = snapshots(transport.rank)
        writer.start(manifest_of(1) if transport.rank == 0 else None, 1, parts)
        writer.release()
        assert writer.take_saved() is None
        assert store.steps() == []
        for part in parts:
            for array in part.arrays:
                buffer_of(array)[:] = bytes(array.nbytes)
        transport.barrier()
        gate.open()
        writer.wait()

    directories = hosts(tmp_path, seen)
    on_ranks(directories, work)
    assert load(directories) == whole(2)
