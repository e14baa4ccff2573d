"""The commands of rank 0 in worlds that seeds draw, with deaths, errors and late answers."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.commands import COMMANDS, Worker, World
from tests.helpers.worlds.rooms import Room

PARTS = 4
WORLDS = 500


@pytest.mark.parametrize("part", range(PARTS))
def test_each_command_is_done_once_in_order_and_a_fault_is_named_with_its_rank(part: int) -> None:
    COMMANDS.worlds(WORLDS, part * WORLDS)


def test_a_seed_makes_the_same_world_again() -> None:
    assert COMMANDS.world(3).trace == COMMANDS.world(3).trace
    assert COMMANDS.world(4).trace != COMMANDS.world(3).trace


class Twice(Worker):
    """A worker whose second rank does each command twice."""

    def tell(self, number: int) -> tuple[int, int]:
        if self.rank == 1:
            super().tell(number)
        return super().tell(number)


def test_a_command_that_is_done_twice_is_seen_and_the_world_says_its_seed() -> None:
    room = Room("commands", lambda simulation: World(simulation, Twice).run())
    with pytest.raises(AssertionError) as seen:
        room.worlds(100)
    assert "--room commands --first " in seen.value.__notes__[0]
