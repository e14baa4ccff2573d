"""Requests in worlds that seeds draw: each text is the text alone, whatever others do meanwhile."""

from __future__ import annotations

import pytest

from shardmlx.inference.commands import Command, PutBack, Reject
from tests.helpers.worlds.requests import REQUESTS, World
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.toy_stages import Stages

PARTS = 8
WORLDS = 250


@pytest.mark.parametrize("part", range(PARTS))
def test_each_text_is_the_text_alone_and_nothing_of_it_stays(part: int) -> None:
    REQUESTS.worlds(WORLDS, part * WORLDS)


def test_a_seed_makes_the_same_world_again() -> None:
    assert REQUESTS.world(3).trace == REQUESTS.world(3).trace
    assert REQUESTS.world(4).trace != REQUESTS.world(3).trace


class Careless(Stages):
    """Stages that forget no draft that was wrong, and drop no sequence that is put back."""

    def apply(self, command: Command) -> None:
        if not isinstance(command, (Reject, PutBack)):
            super().apply(command)


def test_stages_that_keep_what_they_are_to_forget_are_seen_and_the_world_says_its_seed() -> None:
    room = Room("requests", lambda simulation: World(simulation, Careless).run())
    said = {}
    for seed in range(50):
        try:
            room.world(seed)
        except AssertionError as error:
            said[seed] = error.__notes__
    assert len(said) > 5
    assert all(f"--first {seed} " in notes[0] for seed, notes in said.items())
