"""Requests in worlds that seeds draw: each text is the text alone, whatever others do meanwhile."""

from __future__ import annotations

import pytest

from shardmlx.inference.commands import Command, PutBack, Reject
from tests.helpers.scheduling_worlds import live
from tests.helpers.toy_stages import Stages

WORLDS = 2000
"""``python -m tests.helpers.scheduling_worlds`` lives 10,000."""

PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_each_text_is_the_text_alone_and_nothing_of_it_stays(part: int) -> None:
    for seed in range(part, WORLDS, PARTS):
        live(seed)


def test_a_seed_makes_the_same_world_again() -> None:
    assert live(3).trace == live(3).trace
    assert live(4).trace != live(3).trace


class Careless(Stages):
    """Stages that forget no draft that was wrong, and drop no sequence that is put back."""

    def apply(self, command: Command) -> None:
        if not isinstance(command, (Reject, PutBack)):
            super().apply(command)


def test_stages_that_keep_what_they_are_to_forget_are_seen_and_the_world_says_its_seed() -> None:
    said = {}
    for seed in range(50):
        try:
            live(seed, Careless)
        except AssertionError as error:
            said[seed] = error.__notes__
    assert len(said) > 5
    assert all(notes[0].startswith(f"world {seed}: ") for seed, notes in said.items())
