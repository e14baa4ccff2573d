"""Batches travel from rank 0 to all stages, one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.messages import TransportTimeout
from shardmlx.engine.batches import Batch, split
from shardmlx.errors import AgreedFailure
from shardmlx.training.batch_feed import BatchFeed, Share, StopRequested
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch

ROWS = 6
"""Of each replica."""

THREE = Layout("1f1b", 3)
LAYOUTS = (
    Layout("1f1b", 1),
    THREE,
    Layout("zb-v", 2, virtual=2),
    Layout("gpipe", 3, dp=2),
)

Work = Callable[[BatchFeed, LocalTransport], Any]


def feed(
    layout: Layout,
    batches: list[Batch],
    work: Work,
    timeout: float = 20.0,
    *,
    pack: bool = False,
) -> list[Any]:
    """What ``work`` returned on each rank; all that was sent was received."""
    network = LocalNetwork(layout.ranks, timeout)
    plan = layout.plan(layers=8, rows=ROWS, micro_batch_size=4, pack=pack)

    def body(transport: LocalTransport) -> Any:
        source = iter(batches) if transport.rank == 0 else None
        with BatchFeed(plan, transport, source, len(batches)) as mine:
            return work(mine, transport)

    results = network.run(body)
    assert not any(network._sends.values())
    assert not any(network._receives.values())
    return results


def batches_of(layout: Layout, count: int) -> list[Batch]:
    return [random_batch(ROWS * layout.dp, seed) for seed in range(count)]


def describe(share: Share) -> list[Any]:
    """All but the tokens."""
    parts = [(part.shape, part.first_row, part.spans.tolist()) for part in share.microbatches]
    return [share.valid_tokens, *parts]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_its_micro_batches(layout: Layout) -> None:
    batches = batches_of(layout, 3)

    def work(feed: BatchFeed, transport: LocalTransport) -> list[Share]:
        shares = []
        while got := feed.take():
            feed.send_ahead()
            shares += got
        return shares

    for rank, shares in enumerate(feed(layout, batches, work)):
        for share, batch in zip(shares, batches, strict=True):
            wanted = Share(
                split(batch, layout.dp, rank // layout.pp, 4),
                batch.valid_tokens,
                batch.valid_tokens,
            )
            assert describe(share) == describe(wanted)
            for ours, theirs in zip(share.microbatches, wanted.microbatches, strict=True):
                assert ours.tokens.dtype == np.int32
                assert ours.tokens.tolist() == theirs.tokens.tolist()
                assert ours.spans.dtype == theirs.spans.dtype


def test_packed_all_ranks_of_a_pipeline_put_the_same_texts_together() -> None:
    layout = Layout("1f1b", 3, dp=2)
    batches = batches_of(layout, 2)
    shares = feed(layout, batches, lambda feed, transport: feed.take(2), pack=True)
    for rank, own in enumerate(shares):
        first = shares[rank - rank % layout.pp]
        for share, other in zip(own, first, strict=True):
            assert describe(share) == describe(other)
            for part, same in zip(share.microbatches, other.microbatches, strict=True):
                assert part.places is not None
                assert same.places is not None
                assert np.array_equal(part.places.rows, same.places.rows)
    counted = [sum(part.valid_tokens for part in own[1].microbatches) for own in shares[::3]]
    assert sum(counted) == batches[1].valid_tokens


def test_all_ranks_pad_to_the_widths_of_the_plan() -> None:
    layout, widths = Layout("1f1b", 2), (129, 257)
    plan = replace(layout.plan(layers=8, rows=ROWS, micro_batch_size=4), widths=widths)
    batch = replace(random_batch(ROWS, longest=120), widths=widths)

    def body(transport: LocalTransport) -> set[int]:
        source = iter([batch]) if transport.rank == 0 else None
        (share,) = BatchFeed(plan, transport, source, 1).take()
        return {part.tokens.shape[1] for part in share.microbatches}

    assert LocalNetwork(layout.ranks).run(body) == [{129}, {129}]


def test_replicas_of_unequal_rows_get_theirs() -> None:
    layout, rows = Layout("1f1b", 2, dp=2), (5, 3)
    plan = replace(layout.plan(layers=8, rows=5, micro_batch_size=2), replica_rows=rows)
    batch = random_batch(8)

    def body(transport: LocalTransport) -> Share:
        source = iter([batch]) if transport.rank == 0 else None
        return BatchFeed(plan, transport, source, 1).take()[0]

    first, _, second, _ = LocalNetwork(layout.ranks).run(body)
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

    shares = feed(layout, [batch], lambda feed, transport: feed.take())

    widths = [{part.shape[1] for part in share.microbatches} for (share,) in shares]
    assert widths == [{width - 1}, {32}]


def test_several_at_once_and_fewer_at_the_end() -> None:
    def work(feed: BatchFeed, transport: LocalTransport) -> list[int]:
        counts = [len(feed.take(2))]
        feed.send_ahead(2)
        return [*counts, len(feed.take(2)), len(feed.take(2)), len(feed.take(2))]

    assert feed(THREE, batches_of(THREE, 5), work) == [[2, 2, 1, 0]] * 3


def test_a_batch_is_drawn_when_it_is_sent_and_not_before() -> None:
    drawn = []

    def source() -> Iterator[Batch]:
        for number in range(3):
            drawn.append(number)
            yield random_batch(ROWS, number)

    layout = Layout("1f1b", 1)
    network = LocalNetwork(1)

    def work(transport: LocalTransport) -> None:
        mine = BatchFeed(layout.plan(8, ROWS), transport, source(), 3)
        mine.take()
        assert drawn == [0]
        mine.send_ahead()
        assert drawn == [0, 1]
        mine.take()
        assert drawn == [0, 1]

    network.run(work)


def test_rank_0_goes_on_while_a_batch_is_under_way() -> None:
    """Else it could not compute: the others receive when they come to the next step."""
    network = LocalNetwork(2, timeout=0.2)
    plan = Layout("1f1b", 2).plan(8, ROWS)
    (batch,) = batches_of(THREE, 1)

    def work(transport: LocalTransport) -> None:
        if transport.rank == 0:
            BatchFeed(plan, transport, iter([batch]), 1).send_ahead()

    network.run(work)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_request_to_stop_counts_at_the_next_step(is_ahead: bool) -> None:
    def work(feed: BatchFeed, transport: LocalTransport) -> int:
        feed.take()
        if is_ahead:
            feed.send_ahead()
        if transport.rank == 0:
            transport.stop_requested = lambda: 10  # type: ignore[method-assign]
        with pytest.raises(StopRequested) as request:
            feed.take()
        return request.value.number

    assert feed(THREE, batches_of(THREE, 4), work) == [10, 10, 10]


@pytest.mark.parametrize("error", [AgreedError("no room"), AgreedFailure("not finite")])
def test_an_error_of_all_ranks_leaves_nothing_under_way(error: Exception) -> None:
    network = LocalNetwork(3)
    batches = batches_of(THREE, 2)
    plan = THREE.plan(8, ROWS)

    def step(mine: BatchFeed) -> None:
        with mine:
            mine.take()
            mine.send_ahead()
            raise error

    def work(transport: LocalTransport) -> None:
        source = iter(batches) if transport.rank == 0 else None
        mine = BatchFeed(plan, transport, source, 2)
        with pytest.raises(type(error)):
            step(mine)

    network.run(work)
    assert not any(network._sends.values())


def test_an_error_of_one_rank_is_not_held_up() -> None:
    def work(feed: BatchFeed, transport: LocalTransport) -> None:
        feed.take()
        feed.send_ahead()
        if transport.rank == 0:
            raise RuntimeError("Insufficient Memory")

    with pytest.raises(RuntimeError, match="Insufficient Memory"):
        feed(THREE, batches_of(THREE, 2), work, timeout=600.0)


def test_who_waits_says_for_whom() -> None:
    def work(feed: BatchFeed, transport: LocalTransport) -> None:
        if transport.rank:
            feed.take()

    message = r"rank [12] on localhost, next batch, waiting for rank 0 on localhost: nothing came"
    with pytest.raises(TransportTimeout, match=message):
        feed(THREE, batches_of(THREE, 1), work, timeout=0.1)
