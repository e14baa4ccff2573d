"""The engine under orders that seeds draw: whatever comes when, a step has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from shardmlx.distributed.transport import Transport
from tests.helpers.engine_orders import CELLS, Cell
from tests.helpers.seeded_network import SeededNetwork

T = TypeVar("T")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_and_gradients_have_the_same_bits_in_every_order(cell: Cell) -> None:
    """``python -m tests.helpers.engine_orders`` tries 200 of each cell, here there is one."""
    cell.check(0)


def test_a_seed_draws_the_same_order_again_and_another_seed_another() -> None:
    cell = CELLS[-1]
    assert cell.check(5) == cell.check(5)
    assert cell.check(6) != cell.check(5)


def worlds(work: Callable[[Transport], T], size: int = 2) -> list[list[T]]:
    """Return the results of the ranks in each of 30 orders."""
    return [SeededNetwork(size, seed).run(work) for seed in range(30)]


def test_messages_of_one_tag_keep_their_order_and_those_of_two_tags_overtake() -> None:
    def work(transport: Transport) -> list[int]:
        if transport.rank == 0:
            sent = [(np.array([number], np.int64), tag) for number, tag in ((1, 8), (2, 8), (3, 9))]
            handles = [transport.send(array, 1, tag) for array, tag in sent]
        else:
            boxes = [np.zeros(1, np.int64) for _ in range(3)]
            handles = [
                transport.receive(box, 0, tag) for box, tag in zip(boxes, (8, 8, 9), strict=True)
            ]
            transport.wait(handles[1], lambda: "the second of tag 8")
            seen = [int(box[0]) for box in boxes]
        for handle in handles:
            transport.wait(handle, lambda: "the end")
        return seen if transport.rank == 1 else []

    assert {tuple(seen) for _, seen in worlds(work)} == {(1, 2, 0), (1, 2, 3)}


def test_some_order_shows_an_array_that_is_changed_while_it_is_sent_and_some_hides_it() -> None:
    def work(transport: Transport) -> int:
        array = np.array([7 * (1 - transport.rank)], np.int64)
        if transport.rank == 0:
            handle = transport.send(array, 1, 8)
            other = transport.receive(np.zeros(1, np.int64), 1, 9)
            transport.wait(other, lambda: "something else")
            array[0] = 1
        else:
            transport.wait(transport.send(np.zeros(1, np.int64), 0, 9), lambda: "something else")
            handle = transport.receive(array, 0, 8)
        transport.wait(handle, lambda: "the array")
        return int(array[0])

    assert {seen for _, seen in worlds(work)} == {7, 1}


def test_a_world_that_stands_still_ends_and_says_its_seed() -> None:
    def work(transport: Transport) -> None:
        handle = transport.receive(np.zeros(1), 1 - transport.rank, 8)
        transport.wait(handle, lambda: "a message that nobody sends")

    with pytest.raises(TimeoutError, match=r"rank-0, rank-1") as refused:
        SeededNetwork(2, 12).run(work)
    assert "order 12" in refused.value.__notes__[0]


def test_the_failure_of_a_rank_ends_its_world_and_says_its_seed() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 1:
            raise ValueError("rank 1 is out of memory")
        transport.receive_object(1)

    with pytest.raises(ValueError, match="out of memory") as failed:
        SeededNetwork(3, 7).run(work)
    assert "order 7" in failed.value.__notes__[0]
