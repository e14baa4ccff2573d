"""What is said of answers that an objective of preferences compares, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardmlx.config.objective import MEANS, ObjectiveOptions
from shardmlx.engine.batches import KNOWN, REFERENCE, WANTED, MicroBatch
from shardmlx.engine.objectives import Objective
from shardmlx.training.scores import in_words, means_of, scores_of

LOGPS = np.array([-10.0, -30.0, -20.0, -20.0, -25.0, -15.0])
REFERENCES = np.array([-20.0, -20.0, -20.0, -20.0, -20.0, -20.0])
"""Of three pairs: one is judged rightly, one is a tie, one is judged wrongly."""


def microbatch(wanted: list[int]) -> MicroBatch:
    rows = len(wanted)
    known = np.zeros((rows, KNOWN))
    known[:, WANTED], known[:, REFERENCE] = wanted, REFERENCES[:rows]
    return MicroBatch(np.ones((rows, 33), np.int32), np.full((rows, 2), (1, 4)), 0, known=known)


def test_means_of_pairs_from_two_ranks() -> None:
    objective = Objective(ObjectiveOptions(objective="dpo", beta=0.1))
    losses, mine = scores_of({0: LOGPS}, [microbatch([1, 0] * 3)], objective, "float32")
    assert losses == {0: pytest.approx(sum(math.log1p(math.exp(-x)) for x in (2, 0, -1)))}
    means = means_of([mine, [0.0] * len(mine)], objective)
    assert means == pytest.approx(
        {
            "chosen_reward": 0.1 * (10 + 0 - 5) / 3,
            "rejected_reward": 0.1 * (-10 + 0 + 5) / 3,
            "chosen_logp": -55 / 3,
            "rejected_logp": -65 / 3,
            "margin": 0.1 * (20 + 0 - 10) / 3,
            "accuracy": 0.5,
        }
    )
    assert set(means) == set(MEANS)
    assert in_words(means) == ", rewards 0.167 and -0.167, 50% right"


def test_of_answers_that_are_not_there_nothing_is_said() -> None:
    objective = Objective(ObjectiveOptions(objective="kto"))
    _, sums = scores_of({0: LOGPS[:2]}, [microbatch([1, 1])], objective, "float32")
    means = means_of([sums], objective)
    assert means == pytest.approx({"chosen_reward": 0.0, "chosen_logp": -20.0})
    assert in_words(means) == ", rewards 0.000 and none"
    assert means_of([[1.0]], None) == {}


@pytest.mark.parametrize(
    ("dtype", "noise"), [("float32", 6.5e-5), ("float16", 0.05), ("bfloat16", 0.4)]
)
def test_what_rounding_makes_of_the_starting_weights_is_a_tie(dtype: str, noise: float) -> None:
    """Two pairs of the same gains but for noise, and one that differs by more."""
    objective = Objective(ObjectiveOptions(objective="dpo", beta=0.1))
    logps = REFERENCES - 20 + np.array([noise, 0, -noise, 0, 3, 0])
    _, sums = scores_of({0: logps}, [microbatch([1, 0] * 3)], objective, dtype)
    assert means_of([sums], objective)["accuracy"] == pytest.approx((0.5 + 0.5 + 1) / 3)


def test_rewards_without_a_reference_differ_by_any_margin() -> None:
    objective = Objective(ObjectiveOptions(objective="cpo", beta=0.1))
    logps = np.array([-20.0 + 1e-5, -20.0])
    _, sums = scores_of({0: logps}, [microbatch([1, 0])], objective, "bfloat16")
    assert means_of([sums], objective)["accuracy"] == 1.0
