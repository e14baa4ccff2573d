"""Who sees the same disk is found out by looking."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardmlx.checkpoint.store import Store
from shardmlx.distributed.shared_disks import Disks, find_disks
from tests.helpers.checkpoints import on_ranks
from tests.helpers.local_transport import LocalTransport


def look(directories: Sequence[Path]) -> Disks:
    """What ranks find that have these directories: the same on all."""

    def work(transport: LocalTransport, store: Store) -> Disks:
        return find_disks(transport, store.directory)

    first, *others = on_ranks(directories, work)
    assert all(other == first for other in others)
    assert isinstance(first, Disks)
    return first


@pytest.mark.parametrize(
    ("seen", "groups"),
    [
        ("a", ((0,),)),
        ("aaaa", ((0, 1, 2, 3),)),
        ("abcd", ((0,), (1,), (2,), (3,))),
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("abbacb", ((0, 3), (1, 2, 5), (4,))),
    ],
)
def test_ranks_that_see_the_same_directory_share_a_disk(
    tmp_path: Path, seen: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    disks = look([tmp_path / each / "checkpoints" for each in seen])
    assert disks == Disks(groups, (None,) * len(seen))
    for i, group in enumerate(groups):
        assert {disks.of(rank) for rank in group} == {i}
        assert {disks.leader(rank) for rank in group} == {group[0]}


def test_the_directory_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    directories = [tmp_path / "a/b/c"] * 2 + [tmp_path / "d"]
    look(directories)
    assert all(directory.is_dir() and not list(directory.iterdir()) for directory in directories)


def test_two_ways_to_one_directory_are_one_disk(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert look([tmp_path / "real", tmp_path / "link"]).groups == ((0, 1),)


def test_a_rank_that_cannot_write_has_its_own_disk_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert look([tmp_path / "a", tmp_path / "file", tmp_path / "file/b", tmp_path / "a"]) == Disks(
        ((0, 3), (1,), (2,)), (None, "File exists", "Not a directory", None)
    )


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_a_rank_that_may_only_read_a_shared_disk_shares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: int
) -> None:
    touch = Path.touch

    def touch_unless_reader(path: Path) -> None:
        if threading.current_thread().name == f"rank-{reader}":
            raise PermissionError(13, "Permission denied", str(path))
        touch(path)

    monkeypatch.setattr(Path, "touch", touch_unless_reader)
    disks = look([tmp_path] * 3)
    assert disks.groups == ((0, 1, 2),)
    assert [rank for rank in range(3) if disks.problems[rank] is not None] == [reader]
    assert disks.problems[reader] == "Permission denied"
