"""Rounds under way: which go on, which are void, and what stages are to forget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardmlx.distributed.messages import Handle
from shardmlx.inference.drafts import Draft
from shardmlx.inference.rounds import DecodeRounds, Round
from shardmlx.inference.scheduler import Item, ItemKind


def round_of(
    sampled: Sequence[int],
    drafts: tuple[int, ...] = (),
    guess: int | None = None,
    sequence: int = 0,
) -> Round:
    """One whose drafts enter after a token that is known, or a ``guess``."""
    item = Item(ItemKind.DECODE, (sequence,), 1 + len(drafts), guess=guess, drafts=drafts)
    tokens = np.array(sampled, np.int32)[:, None]
    return Round(item, tokens, Handle(tokens, done=True), Draft(drafts), 0.0)


def under_way(*rounds: Round) -> DecodeRounds:
    found = DecodeRounds()
    found.extend(rounds)
    return found


def come(handle: Handle) -> bool:
    return handle.done


def test_rounds_come_in_order_and_void_ones_in_vain() -> None:
    rounds = under_way(round_of([1]), round_of([2], guess=1), round_of([3], sequence=1))
    rounds.make_void(0)
    rounds[2].handle.done = False
    assert [each.item.guess for each in rounds.valid] == [None, None]
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


def test_tokens_of_void_rounds_are_told_once_with_those_rejected() -> None:
    rounds = under_way(round_of([1, 2], (1,), guess=4), round_of([3], guess=2))
    assert rounds.reject(0, 2) == 2
    assert rounds.make_void(0) == 3
    assert rounds.make_void(0) == 0
    assert rounds.reject(1, 0) == 0
    assert rounds.take_rejected() == ((0, 5),)
    assert rounds.take_rejected() == ()


def test_a_token_is_awaited_of_rounds_that_begin_with_a_known_one() -> None:
    rounds = under_way(round_of([1]), round_of([2], guess=1), round_of([2], guess=1, sequence=1))
    assert [rounds.awaits(sequence) for sequence in range(3)] == [True, False, False]
