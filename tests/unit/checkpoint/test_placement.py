"""From who sees the same disk follows who writes what, and who completes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardmlx.checkpoint.storage import Storage, choose_storage
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError

NAMES = [f"rank {rank} on mac-{rank}" for rank in range(8)]


def disks_of(*groups: Sequence[int], unwritable: Sequence[int] = ()) -> Disks:
    ranks = range(sum(map(len, groups)))
    return Disks(
        tuple(tuple(group) for group in groups),
        tuple("Read-only file system" if rank in unwritable else None for rank in ranks),
    )


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


@pytest.mark.parametrize(
    ("wanted", "disks", "named", "remedy"),
    [
        ("shared", PAIRS, 2, "auto"),  # a disk that all see
        ("shared", disks_of([0, 1, 2, 3], unwritable=[1]), 1, "rank0"),
        ("neighbour", disks_of([0], [1], [2], [3], unwritable=[2]), 2, "rank0"),
        ("neighbour", disks_of([0, 1], [2, 3], unwritable=[2]), 2, "rank0"),
        *[
            (wanted, disks_of(*groups, unwritable=[0]), 0, "another directory")
            for wanted in ("auto", "rank0", "shared", "neighbour")
            for groups in (([0, 1],), ([0], [1]))
            if wanted != "shared" or len(groups) == 1
        ],
    ],
)
def test_whoever_cannot_write_what_he_must_is_named(
    wanted: str, disks: Disks, named: int, remedy: str
) -> None:
    with pytest.raises(UserError) as refused:
        choose_storage(wanted, disks, 2, NAMES)
    assert NAMES[named] in refused.value.problem
    assert remedy in str(refused.value)
