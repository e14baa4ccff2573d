"""Sizes of buffers and graphs."""

from __future__ import annotations

import pytest

from shardmlx.engine.buffers import compiled_length


@pytest.mark.parametrize(
    ("length", "compiled"), [(1, 32), (32, 32), (33, 64), (1024, 1024), (1025, 1088), (4000, 4096)]
)
def test_a_graph_of_a_packed_row_has_one_of_a_few_lengths(length: int, compiled: int) -> None:
    assert compiled_length(length) == compiled


def test_there_are_sixteen_lengths_to_a_doubling_and_none_is_a_sixteenth_longer() -> None:
    lengths = range(1025, 2049)
    assert len({compiled_length(each) for each in lengths}) == 16
    assert all(0 <= compiled_length(each) - each < each / 16 for each in lengths)
