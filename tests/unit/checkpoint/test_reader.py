"""Disks are lost, damaged, or out of date: the newest whole checkpoint is read all the same."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from shardmlx.checkpoint.reader import TensorRequest
from shardmlx.checkpoint.store import MANIFEST, MARKER, FileInfo, Store
from shardmlx.checkpoint.writer import Snapshot
from shardmlx.models.runtime.slice import Piece
from tests.helpers.checkpoints import (
    as_bytes,
    flip,
    hosts,
    load,
    manifest_of,
    on_ranks,
    read_all,
    save,
    search,
    whole,
    writer_on,
)
from tests.helpers.local_transport import LocalTransport

SECOND_FILE = "weights-01.safetensors"


@pytest.mark.parametrize("seen", ["ab", "abc", "abcd", "aabbcc", "abac"])
def test_every_disk_may_be_lost_where_neighbours_have_copies(tmp_path: Path, seen: str) -> None:
    owners = min(4, len(seen))
    written = hosts(tmp_path / "all", seen)
    save(written, "neighbour", owners)
    for lost in sorted(set(seen)):
        shutil.copytree(tmp_path / "all", tmp_path / lost)
        shutil.rmtree(tmp_path / lost / lost)
        assert load(hosts(tmp_path / lost, seen)) == whole(owners), lost
        left = "".join(sorted(set(seen) - {lost}))
        assert load(hosts(tmp_path / lost, left)) == whole(owners), lost


def test_without_two_disks_what_they_alone_had_is_named(tmp_path: Path) -> None:
    save(hosts(tmp_path, "abcd"), "neighbour", 4)
    found, faults = search(hosts(tmp_path, "ad"))
    assert found is None
    path = Store(tmp_path / "a/checkpoints").path(1) / "optimizer-01.safetensors"
    assert faults == {1: f"{path} is missing (rank 0 on localhost)"}


@pytest.mark.parametrize("left", ["abd", "dba"])
def test_where_one_copy_is_lost_and_one_damaged_the_damaged_one_is_named(
    tmp_path: Path, left: str
) -> None:
    save(hosts(tmp_path, "abcd"), "neighbour", 4)
    path = Store(tmp_path / "b/checkpoints").path(1) / SECOND_FILE
    flip(path)
    _, faults = search(hosts(tmp_path, left))
    assert f"{path}: its sha256 is " in faults[1]


@pytest.mark.parametrize("name", ["weights-01.safetensors", "optimizer-00.safetensors"])
def test_a_damaged_copy_is_not_read_where_there_is_a_sound_one(tmp_path: Path, name: str) -> None:
    directories = hosts(tmp_path, "ab")
    save(directories, "neighbour", 2)
    for damaged in (0, 1):
        flip(Store(directories[damaged]).path(1) / name)
        found, _ = search(directories)
        assert found is not None
        assert found.disks[name] == (1 - damaged,)
        assert load(directories) == whole(2)
        flip(Store(directories[damaged]).path(1) / name)


@pytest.mark.parametrize("name", [MANIFEST, MARKER])
def test_a_disk_with_a_damaged_manifest_counts_as_lost(tmp_path: Path, name: str) -> None:
    directories = hosts(tmp_path, "ab")
    save(directories, "neighbour", 2)
    flip(Store(directories[0]).path(1) / name, 3)
    found, _ = search(directories)
    assert found is not None
    assert set(found.disks.values()) == {(1,)}
    assert load(directories) == whole(2)


def test_copies_that_are_damaged_crosswise_still_make_a_whole(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "ab")
    save(directories, "neighbour", 2)
    flip(Store(directories[0]).path(1) / "weights-00.safetensors")
    (Store(directories[1]).path(1) / "weights-01.safetensors").unlink()
    assert load(directories) == whole(2)


def test_every_file_is_checked_once_on_each_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = hosts(tmp_path, "aabb")
    save(directories, "neighbour", 4)
    for directory in set(directories):
        flip(Store(directory).path(1) / SECOND_FILE)
    checked: list[Path] = []
    fault = Store.fault

    def spy(store: Store, step: int, file: FileInfo) -> str | None:
        checked.append(store.path(step) / file.name)
        return fault(store, step, file)

    monkeypatch.setattr(Store, "fault", spy)
    assert search(directories)[0] is None
    assert sorted(checked) == sorted(tmp_path.glob("*/checkpoints/*/*.safetensors"))


def test_the_newest_sound_one_is_taken_and_the_others_faults_are_told(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "aa")
    save(directories, "shared", 2, {step: step for step in range(1, 6)}, keep=9)
    store = Store(directories[0])
    flip(store.path(5) / SECOND_FILE)
    flip(store.path(4) / MARKER)
    (store.path(3) / MARKER).unlink()  # so it never was complete
    found, faults = search(directories)
    assert found is not None
    assert found.manifest.step == 2
    assert sorted(faults) == [4, 5]
    assert f"{store.path(5) / SECOND_FILE}: its sha256 is" in faults[5]
    assert faults[5].endswith("(rank 1 on localhost)")  # it checked that one
    assert f"{store.path(4) / MANIFEST}: its sha256 is" in faults[4]
    assert load(directories) == whole(2, seed=2)


def test_the_step_that_is_asked_for_or_none(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "a")
    save(directories, "shared", 1, {1: 1, 2: 2})
    assert load(directories, step=1) == whole(1, seed=1)
    assert search(directories, step=3)[0] is None
    flip(Store(directories[0]).path(1) / "weights-00.safetensors")
    found, faults = search(directories, step=1)
    assert found is None
    assert list(faults) == [1]


@pytest.mark.parametrize("stale", "abc")
def test_a_disk_that_was_away_while_its_step_was_made_anew_is_left_out(
    tmp_path: Path, stale: str
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save(hosts(old, "abc"), "neighbour", 3, {1: 1})
    save(hosts(new, "abc"), "neighbour", 3, {1: 2})
    shutil.rmtree(new / stale)
    shutil.copytree(old / stale, new / stale)
    assert load(hosts(new, "abc")) == whole(3, seed=2)


def test_a_step_that_some_disks_completed_is_there_if_they_have_all_of_it(tmp_path: Path) -> None:
    """As when a run dies between the renames of two disks."""
    for missing in ("b", "cd", "bd"):
        base = tmp_path / missing
        save(hosts(base, "abcd"), "neighbour", 4, {1: 1, 2: 2})
        for each in missing:
            shutil.rmtree(Store(base / each / "checkpoints").path(2))
        expected = 1 if missing == "cd" else 2
        assert load(hosts(base, "abcd")) == whole(4, seed=expected), missing


def pieces_of(rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> dict[str, Piece]:
    return {"up": Piece(tuple(rows), 12, 0), "down": Piece((columns,), 8, 1)}


EVEN = [
    pieces_of([(0, 3), (6, 9)], (0, 4)),  # two matrices in one
    pieces_of([(3, 6), (9, 12)], (4, 8)),
]
UNEVEN = [
    pieces_of([(0, 4), (6, 10)], (0, 6)),
    pieces_of([(4, 5), (10, 11)], (6, 7)),
    pieces_of([(5, 6), (11, 12)], (7, 8)),
]
ACROSS = [
    {"up": Piece(((0, 2),), 5, 1), "down": Piece(((0, 2), (4, 5)), 6, 0)},
    {"up": Piece(((2, 5),), 5, 1), "down": Piece(((2, 4), (5, 6)), 6, 0)},
]
ALL: list[dict[str, Piece]] = [{}]


@pytest.mark.parametrize("seen", ["aaa", "abc"])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (EVEN, EVEN),
        (EVEN, UNEVEN),
        (UNEVEN, EVEN),
        (EVEN, ALL),
        (ALL, UNEVEN),
        (ACROSS, UNEVEN),
        (EVEN, ACROSS),
    ],
)
def test_a_piece_is_read_from_whatever_pieces_were_written(
    tmp_path: Path,
    seen: str,
    written: Sequence[Mapping[str, Piece]],
    read: Sequence[Mapping[str, Piece]],
) -> None:
    wholes = {"up": mx.arange(60).reshape(12, 5), "down": mx.arange(48).reshape(6, 8)}
    mx.eval(wholes)

    def part(pieces: Mapping[str, Piece], suffix: str) -> dict[str, mx.array]:
        cut = {k: pieces[k].of(v) if k in pieces else v for k, v in wholes.items()}
        return {name + suffix: array for name, array in cut.items()}

    suffixes = {"weights": "", "optimizer": ".m"}

    def write(transport: LocalTransport, store: Store) -> None:
        rank = transport.rank
        writer = writer_on(transport, store, "rank0", len(written))
        parts = [
            Snapshot.of(f"{kind}-{rank:02d}.safetensors", part(pieces, suffix), pieces)
            for pieces in written[rank : rank + 1]
            for kind, suffix in suffixes.items()
        ]
        writer.start(manifest_of(1) if rank == 0 else None, 1, parts)
        writer.wait()

    directories = hosts(tmp_path, seen)
    on_ranks(directories, write)
    found, _ = search(directories)
    assert found is not None
    owns = [read[min(rank, len(read) - 1)] for rank in range(len(seen))]
    readings = {
        rank: [
            TensorRequest(kind, {*part(own, end)}.__contains__, own)
            for kind, end in suffixes.items()
        ]
        for rank, own in enumerate(owns)
    }
    of_ranks = on_ranks(
        directories, lambda transport, store: read_all(transport, store, found, lambda _: readings)
    )
    for own, got in zip(owns, of_ranks, strict=True):
        assert got == as_bytes(part(own, "") | part(own, ".m"))
