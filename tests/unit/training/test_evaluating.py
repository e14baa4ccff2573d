"""While losses are only looked at, nothing is dropped, also where one look is inside another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardmlx.models.runtime.slice import Slice
from shardmlx.training.losses import evaluating
from tests.helpers.models_and_batches import tiny_model


def test_a_look_inside_another_leaves_the_mode_to_the_outer_one() -> None:
    """As that for KTO's reference point is, in a validation."""
    model = tiny_model(layers=2)
    parts = [Slice(model, 0, 1), Slice(model, 1, 2)]
    job: Any = SimpleNamespace(stages=[SimpleNamespace(part=part) for part in parts])
    with evaluating(job):
        assert [part.training for part in parts] == [False, False]
        with evaluating(job):
            assert [part.training for part in parts] == [False, False]
        assert [part.training for part in parts] == [False, False]
    assert [part.training for part in parts] == [True, True]
