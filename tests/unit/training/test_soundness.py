"""Whether what was trained is worth keeping."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.training.nonfinite import nonfinite_gradient, nonfinite_loss, nonfinite_weight
from shardmlx.training.soundness import (
    TAMER,
    Best,
    Fault,
    not_finite,
    nothing_moved,
    skipped_most,
)

OF_RANK = ("mine.0", "mine.1")


@pytest.mark.parametrize("broken", OF_RANK)
def test_each_rank_looks_at_its_own_weights(broken: str) -> None:
    """In the place of what others own a rank has a room, in which another weight may be."""
    part = {name: mx.array(math.nan if name == broken else 1.0) for name in OF_RANK}
    stage: Any = SimpleNamespace(index=0, names=OF_RANK, part=part)
    found = [nonfinite_weight([stage], mine.__eq__, f"rank of {mine}") for mine in OF_RANK]
    fault = not_finite(found)
    assert fault == Fault(f"the weight {broken} is not finite on rank of {broken}, stage 0", TAMER)
    assert found.count(None) == 1
    assert not_finite([None, None]) is None


def test_a_gradient_and_a_loss_that_are_not_finite_are_named_with_their_rank() -> None:
    gradients = {"a": mx.array(1.0), "b": mx.array([2.0, -math.inf])}
    stage: Any = SimpleNamespace(index=3, gradients=gradients)
    assert nonfinite_gradient([stage], "rank 1 on mac") == (
        "the gradient of b is not finite on rank 1 on mac, stage 3"
    )
    assert nonfinite_loss({0: 1.0, 4: math.nan}, "rank 1 on mac") == (
        "the loss of micro-batch 4 is nan on rank 1 on mac"
    )
    assert nonfinite_loss({0: 1.0}, "rank 1 on mac") is None


@pytest.mark.parametrize("mover", [0, 1, None])
def test_a_weight_that_one_rank_has_moved_is_enough_for_all(mover: int | None) -> None:
    moved = [rank == mover for rank in range(2)]
    before = nothing_moved([], moved)
    after = nothing_moved([True], moved)
    if mover is None:
        assert before == Fault("no update was made yet", "train for more steps")
        assert after is not None
        assert "--learning-rate" in after.remedy
    else:
        assert (before, after) == (None, None)


def test_a_run_that_skips_more_updates_than_it_makes_is_at_fault() -> None:
    assert skipped_most([]) is None
    assert skipped_most([True, False]) is None
    assert skipped_most([True, False, False]) == Fault(
        "2 of the last 3 updates were skipped", TAMER
    )


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    best, misses = Best(), []
    for step, loss in enumerate([math.nan, 3.0, math.nan, 2.0, None, math.inf], 1):
        best = best.after(step, loss)
        misses.append(best.misses)
    assert (best.loss, best.step) == (2.0, 4)
    assert misses == [1, 0, 1, 0, 1, 2]
