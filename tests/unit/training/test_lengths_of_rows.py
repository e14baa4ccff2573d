"""What the rows of a data set say to the planner, and which models' rows can be packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardmlx.engine.batches import Samples
from shardmlx.modelfiles.parts import read_shape
from shardmlx.training.datasets import mean_lengths
from tests.helpers.family_configs import CONFIGS
from tests.helpers.models_and_batches import tiny_config
from tests.helpers.undeclared_configs import UNDECLARED


def test_rows_are_not_packed_where_positions_in_the_row_matter() -> None:
    shape = read_shape(tiny_config())
    assert shape.takes_packed
    assert not replace(shape, has_dynamic_rope=True).takes_packed
    assert not read_shape(CONFIGS["internlm3"]).takes_packed
    assert not read_shape(UNDECLARED["gpt2"]).takes_packed


def of(*bounds: tuple[int, int]) -> Samples:
    """Return samples of these lengths, and starts of their losses."""
    return Samples(np.zeros(0), np.array([(0, length, start) for length, start in bounds]))


def test_the_lengths_of_rows_with_and_without_padding() -> None:
    samples = of((10, 0), (33, 0), (34, 0), (200, 0))
    # Inputs are one token shorter, and padded to a multiple of 32 unless they are cut.
    assert mean_lengths(samples, 1, 128) == (
        round((32 + 64 + 64 + 128) / 4),
        round((9 + 32 + 33 + 127) / 4),
        1.0,
    )
    assert mean_lengths(samples, 3, 128)[1] == round((9 + 32 + 33) / 3)
    assert mean_lengths(samples, 1, 128, (65, 128))[0] == round((64 + 64 + 64 + 127) / 4)


def test_the_share_of_tokens_that_count() -> None:
    """Of two answers, and of none: the prompt is longer than what is looked at."""
    samples = of((11, 6), (21, 1), (50, 45))
    assert mean_lengths(samples, 1, 41)[2] == (5 + 20 + 0) / (10 + 20 + 40)
