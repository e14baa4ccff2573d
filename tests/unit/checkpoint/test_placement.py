"""Who sees the same disk is found out; from it follows who writes what, and who completes it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardmlx.checkpoint.placement import Disks, Storage, choose_storage, find_disks
from shardmlx.checkpoint.store import Store
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.local_transport import LocalTransport
from tests.helpers.checkpoints import on_ranks

NAMES = [f"rank {rank} on mac-{rank}" for rank in range(8)]


def disks_of(*groups: Sequence[int], unwritable: Sequence[int] = ()) -> Disks:
    ranks = range(sum(map(len, groups)))
    return Disks(
        tuple(tuple(group) for group in groups),
        tuple("Read-only file system" if rank in unwritable else None for rank in ranks),
    )


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


@pytest.mark.parametrize("groups", [((0,), (0, 1)), ((0,),), ((0,), (2,))])
def test_disks_have_every_rank_once(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="are not 2 ranks, each once"):
        Disks(groups, (None, None))


# Who writes what.

SHARED, APART = disks_of([0, 1, 2, 3]), disks_of([0], [1], [2], [3])
PAIRS = disks_of([0, 1], [2, 3])


@pytest.mark.parametrize(
    ("disks", "wanted", "kind"),
    [
        (SHARED, "auto", "shared"),
        (SHARED, "shared", "shared"),
        (SHARED, "rank0", "rank0"),
        (SHARED, "neighbour", "shared"),  # there is no other disk
        (APART, "auto", "rank0"),
        (APART, "rank0", "rank0"),
        (APART, "neighbour", "neighbour"),
        (PAIRS, "auto", "rank0"),
        (disks_of([0]), "auto", "shared"),
        (disks_of([0, 1], unwritable=[1]), "auto", "rank0"),
        (disks_of([0, 1, 2, 3], unwritable=[2]), "auto", "shared"),  # it saves nothing
    ],
)
def test_auto_takes_the_common_disk_or_else_that_of_rank_0(
    disks: Disks, wanted: str, kind: str
) -> None:
    owners = min(2, len(disks.problems))
    assert choose_storage(wanted, disks, owners, NAMES) == Storage(kind, disks, owners)


@pytest.mark.parametrize(
    ("storage", "homes", "writers", "committers"),
    [
        (Storage("shared", SHARED, 4), [(0,), (1,), (2,), (3,)], {0, 1, 2, 3}, (0,)),
        (Storage("shared", SHARED, 2), [(0,), (1,)], {0, 1}, (0,)),
        (Storage("rank0", APART, 3), [(0,), (0,), (0,)], {0}, (0,)),
        (
            Storage("neighbour", APART, 4),
            [(0, 1), (1, 2), (2, 3), (3, 0)],
            {0, 1, 2, 3},
            (0, 1, 2, 3),
        ),
        (Storage("neighbour", PAIRS, 4), [(0, 2), (1, 2), (2, 0), (3, 0)], {0, 1, 2, 3}, (0, 2)),
        (Storage("neighbour", PAIRS, 2), [(0, 2), (1, 2)], {0, 1, 2}, (0, 2)),
    ],
)
def test_parts_are_written_at_home(
    storage: Storage,
    homes: list[tuple[int, ...]],
    writers: set[int],
    committers: tuple[int, ...],
) -> None:
    assert [storage.homes(owner) for owner in range(storage.owners)] == homes
    assert storage.writers == writers
    assert storage.committers == committers


@pytest.mark.parametrize("disks", [APART, PAIRS, disks_of([0, 3], [1, 2, 5], [4])])
@pytest.mark.parametrize("owners", [1, 2, 3, 4])
def test_a_neighbour_has_another_disk_and_whoever_writes_has_one_who_completes(
    disks: Disks, owners: int
) -> None:
    storage = choose_storage("neighbour", disks, owners, NAMES)
    for owner in range(owners):
        assert len({disks.of(home) for home in storage.homes(owner)}) == 2
    assert {disks.leader(rank) for rank in storage.writers} <= set(storage.committers)


def test_shared_needs_a_disk_that_all_see() -> None:
    with pytest.raises(AgreedError) as refused:
        choose_storage("shared", PAIRS, 2, NAMES)
    assert str(refused.value) == (
        "--checkpoint-storage shared: rank 2 on mac-2 does not see the --checkpoint-dir of rank 0 "
        "on mac-0: name a directory on a disk that both have, or use auto"
    )


@pytest.mark.parametrize(
    ("wanted", "disks", "rank"),
    [
        ("shared", disks_of([0, 1, 2, 3], unwritable=[1]), 1),
        ("neighbour", disks_of([0], [1], [2], [3], unwritable=[2]), 2),
        ("neighbour", disks_of([0, 1], [2, 3], unwritable=[2]), 2),
    ],
)
def test_whoever_cannot_write_what_he_must_is_named(wanted: str, disks: Disks, rank: int) -> None:
    with pytest.raises(AgreedError) as refused:
        choose_storage(wanted, disks, 2, NAMES)
    assert str(refused.value) == (
        f"{NAMES[rank]} cannot write to --checkpoint-dir: Read-only file system: name another "
        "directory, or use --checkpoint-storage rank0"
    )


@pytest.mark.parametrize("wanted", ["auto", "rank0", "shared", "neighbour"])
@pytest.mark.parametrize("groups", [([0, 1],), ([0], [1])])
def test_without_rank_0_there_is_nothing_left_but_another_directory(
    wanted: str, groups: tuple[list[int], ...]
) -> None:
    if wanted == "shared" and len(groups) == 2:
        return
    with pytest.raises(AgreedError) as refused:
        choose_storage(wanted, disks_of(*groups, unwritable=[0]), 2, NAMES)
    assert str(refused.value) == (
        "rank 0 on mac-0 cannot write to --checkpoint-dir: Read-only file system: name another "
        "directory"
    )


@pytest.mark.parametrize("wanted", ["auto", "rank0"])
def test_who_writes_nothing_need_not_be_able_to(wanted: str) -> None:
    assert choose_storage(wanted, disks_of([0], [1], unwritable=[1]), 2, NAMES).kind == "rank0"
