"""Rounds under way: which go on, which are void, and what of them is unsure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardmlx.distributed.messages import Handle
from shardmlx.inference.commands import Decode
from shardmlx.inference.drafts import Draft
from shardmlx.inference.rounds import DecodeRounds, Round


def round_of(
    sampled: Sequence[int],
    drafts: tuple[int, ...] = (),
    guess: int | None = None,
    sequence: int = 0,
    *,
    runs_ahead: bool = False,
) -> Round:
    """One whose drafts enter after a token that is known, or a ``guess``."""
    item = Decode((sequence,), 0, drafts=drafts, guess=guess)
    tokens = np.array(sampled, np.int32)[:, None]
    handle = Handle(tokens, done=True)
    return Round(item, tokens, handle, Draft(drafts), runs_ahead=runs_ahead)


def under_way(*rounds: Round) -> DecodeRounds:
    found = DecodeRounds()
    found.extend(rounds)
    return found


def come(under_way: Round) -> bool:
    return under_way.handle.done


def test_rounds_come_in_order_and_void_ones_in_vain() -> None:
    rounds = under_way(round_of([1]), round_of([2], guess=1), round_of([3], sequence=1))
    rounds.make_guesses_void(0)
    rounds[2].handle.done = False
    assert [each.is_guessed for each in rounds.valid] == [False, False]
    first = rounds.take(come)
    assert first is not None
    assert first.right == [1]
    assert rounds.take(come) is None
    assert len(rounds) == 1
    rounds[0].handle.done = True
    assert rounds.take(come) is not None
    assert not rounds


@pytest.mark.parametrize(
    ("sampled", "right", "is_followed"),
    [([5, 6, 7], [5, 6, 7], True), ([5, 9, 7], [5, 9], False), ([9, 6, 7], [9], False)],
    ids=str,
)
def test_a_round_may_be_followed_while_its_drafts_are_right(
    sampled: list[int], right: list[int], is_followed: bool
) -> None:
    rounds = under_way(
        round_of([8], guess=7, sequence=1), round_of([8], guess=7), round_of([9], guess=8)
    )
    back = round_of(sampled, drafts=(5, 6))
    assert back.right == right
    assert rounds.following(back) is (rounds[1] if is_followed else None)


def test_what_came_on_a_guess_is_void_once() -> None:
    rounds = under_way(round_of([1, 2], (1,), guess=4), round_of([3], guess=2))
    assert [each.unsure for each in rounds.make_guesses_void(0)] == [2, 1]
    assert rounds.make_guesses_void(0) == []


@pytest.mark.parametrize(
    ("begun", "unsure"),
    [
        (round_of([1]), 0),
        (round_of([1, 2, 3], (1, 2)), 2),
        (round_of([1, 2], (1,), guess=4), 2),
        (round_of([1], runs_ahead=True), 1),
    ],
    ids=["plain", "drafts", "guess", "ahead"],
)
def test_of_a_sequence_that_leaves_what_was_known_stays(begun: Round, unsure: int) -> None:
    rounds = under_way(begun, round_of([5], sequence=1))
    (left,) = rounds.leave(0)
    assert left.unsure == unsure
    assert rounds.leave(0) == []
    rounds.forget_void()
    assert [each.item.sequences for each in rounds] == [(1,)]
