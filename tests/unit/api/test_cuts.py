"""A request is cut into the micro-batches that ``train`` would make of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmlx.api.client import TrainClient
from shardmlx.api.cuts import CutRows, cut
from shardmlx.api.requests import ForwardBackward, LossRow
from tests.helpers.loops import on_ranks

pytestmark = pytest.mark.usefixtures("limited_to_a_test")


def cut_on(model: Path, ranks: int, lengths: Sequence[int], most: int) -> list[CutRows]:
    """The micro-batches of rows of these lengths, if memory allows ``most`` tokens in each."""

    def work(client: TrainClient) -> list[CutRows]:
        rows = [
            LossRow(np.ones(each, np.int32), {"target_tokens": np.ones(each, np.int64)})
            for each in lengths
        ]
        return cut(ForwardBackward("a", rows), replace(client.service._plan, tokens=most))

    found: list[CutRows] = on_ranks(ranks, model, work, max_train_length=64)
    return found


def test_8_rows_of_64_tokens_on_two_ranks_are_4_micro_batches(small: Path) -> None:
    """As ``train`` divides them: 4 of 2 rows leave less of the set-up, and no longer bubble."""
    pieces = cut_on(small, 2, [64] * 8, 1024)
    assert [list(each.rows) for each in pieces] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [each.microbatch.shape for each in pieces] == [(2, 64)] * 4


def test_4_rows_are_2_micro_batches_though_4_would_be_a_little_faster_alone(small: Path) -> None:
    """Alone they take (2 + 1) x (128 + 24) tokens' time, and not (4 + 1) x (64 + 24)."""
    pieces = cut_on(small, 2, [64] * 4, 1024)
    assert [list(each.rows) for each in pieces] == [[0, 1], [2, 3]]


def test_one_rank_has_no_bubble_and_computes_few_micro_batches(small: Path) -> None:
    pieces = cut_on(small, 1, [16] * 6, 1024)
    assert [list(each.rows) for each in pieces] == [[0, 1, 2, 3, 4, 5]]


def test_rows_that_would_be_padded_are_packed(small: Path) -> None:
    pieces = cut_on(small, 1, [40, 24], 512)
    assert [list(each.rows) for each in pieces] == [[0, 1]]
    assert pieces[0].microbatch.shape == (1, 64)


def test_no_micro_batch_has_more_tokens_than_memory_was_planned_for(small: Path) -> None:
    lengths = [48, 7, 33, 48, 12, 40, 21]
    pieces = cut_on(small, 2, lengths, 48)
    assert sorted(i for each in pieces for i in each.rows) == [*range(7)]
    assert max(sum(lengths[i] for i in each.rows) for each in pieces) <= 48
    firsts = [lengths[each.rows[0]] for each in pieces]
    assert firsts == sorted(firsts, reverse=True)
