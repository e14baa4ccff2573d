"""The rows of a batch reach all ranks of their replica, in the same micro-batches."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardmlx.engine.batches import Batch, split
from shardmlx.pipeline.plan import Plan
from shardmlx.training.rows import Share, rows_of_ranks, share_of
from tests.helpers.models_and_batches import Layout, random_batch

ROWS = 6
"""Of each replica."""

LAYOUTS = (
    Layout("1f1b", 1),
    Layout("1f1b", 3),
    Layout("zb-v", 2, virtual=2),
    Layout("gpipe", 3, dp=2),
)


def shares(plan: Plan, batch: Batch) -> list[Share]:
    """Return the share of each rank, whose rows were sent to it."""
    sent = pickle.loads(pickle.dumps(rows_of_ranks(plan, batch)))
    return [share_of(plan, rank, rows) for rank, rows in enumerate(sent)]


def describe(share: Share) -> list[Any]:
    """All but the tokens."""
    parts = [(part.shape, part.first_row, part.spans.tolist()) for part in share.microbatches]
    return [share.valid_tokens, *parts]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_its_micro_batches(layout: Layout) -> None:
    plan = layout.plan(layers=8, rows=ROWS, micro_batch_size=4)
    batch = random_batch(ROWS * layout.dp, 1)
    for rank, share in enumerate(shares(plan, batch)):
        wanted = Share(
            split(batch, layout.dp, rank // layout.pp, 4), batch.valid_tokens, batch.valid_tokens
        )
        assert describe(share) == describe(wanted)
        assert share.count == batch.valid_tokens
        for ours, theirs in zip(share.microbatches, wanted.microbatches, strict=True):
            assert ours.tokens.dtype == np.int32
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.spans.dtype == theirs.spans.dtype


def test_ranks_of_a_replica_are_sent_one_object() -> None:
    """It is pickled once."""
    plan = Layout("1f1b", 3, dp=2).plan(layers=8, rows=ROWS, micro_batch_size=4)
    rows = rows_of_ranks(plan, random_batch(2 * ROWS))
    assert [rows[rank] is rows[0] for rank in range(6)] == [True] * 3 + [False] * 3
    assert len({id(each) for each in rows}) == 2


def test_packed_all_ranks_of_a_pipeline_put_the_same_texts_together() -> None:
    layout = Layout("1f1b", 3, dp=2)
    plan = layout.plan(layers=8, rows=ROWS, micro_batch_size=4, pack=True)
    batch = random_batch(2 * ROWS, 1)
    found = shares(plan, batch)
    for rank, share in enumerate(found):
        first = found[rank - rank % layout.pp]
        assert describe(share) == describe(first)
        for part, same in zip(share.microbatches, first.microbatches, strict=True):
            assert part.places is not None
            assert same.places is not None
            assert np.array_equal(part.places.rows, same.places.rows)
    counted = [sum(part.valid_tokens for part in own.microbatches) for own in found[::3]]
    assert sum(counted) == batch.valid_tokens


def test_all_ranks_pad_to_the_widths_of_the_plan() -> None:
    layout, widths = Layout("1f1b", 2), (129, 257)
    plan = replace(layout.plan(layers=8, rows=ROWS, micro_batch_size=4), widths=widths)
    batch = replace(random_batch(ROWS, longest=120), widths=widths)
    found = [{part.tokens.shape[1] for part in share.microbatches} for share in shares(plan, batch)]
    assert found == [{129}, {129}]


def test_replicas_of_unequal_rows_get_theirs() -> None:
    layout, rows = Layout("1f1b", 2, dp=2), (5, 3)
    plan = replace(layout.plan(layers=8, rows=5, micro_batch_size=2), replica_rows=rows)
    batch = random_batch(8)
    first, _, second, _ = shares(plan, batch)
    assert [part.first_row for part in first.microbatches] == [0, 2, 4]
    assert describe(second) == [
        batch.valid_tokens,
        *describe(Share(split(batch.rows(5, 8), 1, 0, 2), 0, 0))[1:],
    ]


def test_a_replica_is_sent_its_rows_without_the_padding_of_the_others() -> None:
    layout = Layout("1f1b", 1, dp=2)
    short, long = random_batch(ROWS, 1, longest=20), random_batch(ROWS, 2, longest=200)
    width = long.tokens.shape[1]
    wide = np.zeros((ROWS, width), np.int32)
    wide[:, : short.tokens.shape[1]] = short.tokens
    batch = Batch(np.vstack([long.tokens, wide]), np.vstack([long.spans, short.spans]), 0)
    plan = layout.plan(layers=8, rows=ROWS, micro_batch_size=4)
    widths = [{part.shape[1] for part in share.microbatches} for share in shares(plan, batch)]
    assert widths == [{width - 1}, {32}]
