"""What the rows of a data set say to the planner, and which models' rows can be packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardmlx.engine.batches import counted_in
from shardmlx.modelfiles.parts import read_shape
from shardmlx.training.datasets import mean_lengths
from testbed.family_configs import CONFIGS
from testbed.tiny_models import tiny_config
from testbed.undeclared_configs import UNDECLARED


def test_rows_are_not_packed_where_positions_in_the_row_matter() -> None:
    shape = read_shape(tiny_config())
    assert shape.takes_packed
    assert not replace(shape, has_dynamic_rope=True).takes_packed
    assert not read_shape(CONFIGS["internlm3"]).takes_packed
    assert not read_shape(UNDECLARED["gpt2"]).takes_packed


def test_the_lengths_of_rows_with_and_without_padding() -> None:
    lengths = np.array([10, 33, 34, 200])
    counted = np.minimum(lengths, 128) - 1
    # Inputs are one token shorter, and padded to a multiple of 32 unless they are cut.
    assert mean_lengths(lengths, counted, 1, 128) == (
        round((32 + 64 + 64 + 128) / 4),
        round((9 + 32 + 33 + 127) / 4),
        1.0,
    )
    assert mean_lengths(lengths, counted, 3, 128)[1] == round((9 + 32 + 33) / 3)
    widths = (65, 128)
    assert mean_lengths(lengths, counted, 1, 128, widths)[0] == round((64 + 64 + 64 + 127) / 4)


@pytest.mark.parametrize(
    ("length", "start", "counted"), [(11, 6, 5), (21, 1, 20), (21, 0, 20), (50, 45, 0), (50, 40, 1)]
)
def test_the_tokens_of_a_sample_that_count(length: int, start: int, counted: int) -> None:
    """Of a prompt that is longer than what is looked at, none; nor the first token."""
    tokens = list(range(length))
    assert counted_in(tokens, start, 41) == counted
    tokens[8] = ~tokens[8]  # one that does not count
    assert counted_in(tokens, start, 41) == counted - (start <= 8)


def test_the_share_of_tokens_that_count() -> None:
    lengths, counted = np.array([11, 21, 50]), np.array([5, 20, 0])
    assert mean_lengths(lengths, counted, 1, 41)[2] == (5 + 20 + 0) / (10 + 20 + 40)
