"""Times lean on each other, and say so where they are defined."""

from __future__ import annotations

import pytest

from shardmlx.distributed.times import (
    LONGEST_SILENCE,
    MOST_TURNS,
    SECONDS_OF_A_TURN,
    SHORTEST_SILENCE,
    in_order,
    silence_limit,
    turn,
)


@pytest.mark.parametrize("seconds", [(0.1, 0.1), (0.5, 0.2), (0.1, 0.3, 0.2)])
def test_times_that_are_out_of_order_are_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{seconds[-1]} s: not in order"):
        in_order(*seconds)


def test_times_in_order_are_not() -> None:
    in_order(0.1, 0.2, 0.3)


def test_a_rank_waits_for_lower_ones_but_not_for_ever() -> None:
    assert [turn(rank) for rank in (0, 1, 2)] == [0.0, SECONDS_OF_A_TURN, 2 * SECONDS_OF_A_TURN]
    assert turn(100) == turn(MOST_TURNS)


def test_silence_ends_before_a_message_times_out() -> None:
    assert silence_limit(1.0) == SHORTEST_SILENCE
    assert silence_limit(10.0) == 9.0
    assert silence_limit(600.0) == LONGEST_SILENCE
