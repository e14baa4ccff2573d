"""The factor of the loss: found by itself, or given."""

from __future__ import annotations

import pytest

from shardmlx.engine.loss_scale import FIRST, LEAST, MOST, UPDATES_TO_GROW, LossScale


@pytest.mark.parametrize(
    ("option", "dtype", "factor", "adapts"),
    [
        (None, "float16", FIRST, True),
        (None, "bfloat16", 1.0, False),
        (None, "float32", 1.0, False),
        ("auto", "float32", FIRST, True),
        ("none", "float16", 1.0, False),
        (1024.0, "float16", 1024.0, False),
        (0.25, "bfloat16", 0.25, False),
    ],
)
def test_an_option_and_a_type_decide(
    option: float | str | None, dtype: str, factor: float, adapts: bool
) -> None:
    assert LossScale.of(option, dtype) == LossScale(factor, adapts)


def test_it_halves_at_once_and_doubles_after_many_updates() -> None:
    scale = LossScale.of("auto", "float16")
    assert scale.overflowed()
    assert scale.factor == FIRST / 2
    for _ in range(UPDATES_TO_GROW - 1):
        scale.updated()
    assert scale.factor == FIRST / 2
    scale.updated()
    assert (scale.factor, scale.good) == (FIRST, 0)


def test_an_overflow_begins_the_count_anew() -> None:
    scale = LossScale(FIRST, adapts=True, good=UPDATES_TO_GROW - 1)
    assert scale.overflowed()
    scale.updated()
    assert (scale.factor, scale.good) == (FIRST / 2, 1)


def test_it_stays_within_its_limits() -> None:
    least = LossScale(LEAST, adapts=True)
    assert not least.overflowed(), "the gradient itself is not finite"
    most = LossScale(MOST, adapts=True, good=UPDATES_TO_GROW)
    most.updated()
    assert most.factor == MOST


def test_one_that_was_given_stays() -> None:
    scale = LossScale.of(8.0, "float16")
    assert not scale.overflowed()
    for _ in range(UPDATES_TO_GROW):
        scale.updated()
    scale.restore([64.0, 3])
    assert scale.factor == 8.0


def test_a_checkpoint_goes_on_with_it() -> None:
    scale = LossScale.of("auto", "float16")
    scale.overflowed()
    scale.updated()
    again = LossScale.of("auto", "float16")
    again.restore(scale.state())
    assert again == scale
