"""Checks of every ``Transport``, which all its ranks (two or more) run together.

``test_transport.py`` runs them on threads and under mpirun.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.distributed.messages import Handle, TransportTimeout
from shardmlx.distributed.sums import Sums, equal_parts
from shardmlx.distributed.transport import Transport
from shardmlx.distributed.wire_formats import WIRE_FORMATS, Int8

FORTY_MEGABYTES = 10_000_000
"""Elements of float32."""

SECONDS_TO_ASK = 2.0
"""Time in which the threads of all ranks have begun a sum: MPI connects them first."""


def full(value: float, shape: Sequence[int] = (4,), dtype: mx.Dtype = mx.float32) -> mx.array:
    # Not mx.full: its result is a broadcast, which has no buffer of its own.
    array = mx.zeros(shape, dtype) + mx.array(value, dtype)
    mx.eval(array)
    return array


def wait(transport: Transport, *handles: Handle) -> None:
    for handle in handles:
        transport.wait(handle, lambda: "a test's message")


def neighbours(transport: Transport) -> tuple[int, int]:
    return (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size


def exchange(transport: Transport, array: mx.array, tag: int = 1) -> mx.array:
    """Send to the rank after this one what must come the same from the rank before."""
    before, after = neighbours(transport)
    got = full(0, array.shape, array.dtype)
    wait(transport, transport.send(array, after, tag), transport.receive(got, before, tag))
    return got


def check_every_rank_knows_itself_and_the_others(transport: Transport) -> None:
    assert transport.all_gather(transport.rank) == list(range(transport.size))
    assert len(transport.hosts) == transport.size
    assert transport.name(1) == f"rank 1 on {transport.hosts[1]}"


def check_it_says_how_to_stop_the_run_that_mpirun_started(transport: Transport) -> None:
    mpirun = f"kill -USR1 {os.getpid()}" if "PMIX_NAMESPACE" in os.environ else None
    assert transport.stop_command() == mpirun


def check_messages_of_one_tag_arrive_in_the_order_of_sending(transport: Transport) -> None:
    before, after = neighbours(transport)
    inboxes = [full(-1) for _ in range(20)]
    received = [transport.receive(inbox, before, 7) for inbox in inboxes]
    sent = [transport.send(full(i), after, 7) for i in range(20)]
    wait(transport, *sent, *received)
    assert [inbox[0].item() for inbox in inboxes] == list(range(20))


def check_tags_keep_messages_apart_in_any_order(transport: Transport) -> None:
    before, after = neighbours(transport)
    tags = [1, 2, 3, 1000, 40_000, 2_000_001]
    sent = [transport.send(full(tag % 997), after, tag) for tag in tags]
    inboxes = {tag: full(-1) for tag in reversed(tags)}
    wait(transport, *(transport.receive(inbox, before, tag) for tag, inbox in inboxes.items()))
    wait(transport, *sent)
    assert {tag: inbox[0].item() for tag, inbox in inboxes.items()} == {t: t % 997 for t in tags}


def check_senders_are_kept_apart(transport: Transport) -> None:
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    sent = [transport.send(full(transport.rank), peer, 3) for peer in others]
    inboxes = {peer: full(-1) for peer in reversed(others)}
    wait(transport, *(transport.receive(inbox, peer, 3) for peer, inbox in inboxes.items()))
    wait(transport, *sent)
    assert all(inbox[0].item() == peer for peer, inbox in inboxes.items())


def check_every_dtype_comes_bit_by_bit(transport: Transport) -> None:
    for dtype in (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint32, mx.uint8, mx.bool_):
        array = (mx.arange(1, 60).reshape(1, 59) / 7).astype(dtype)
        mx.eval(array)
        got = exchange(transport, array)
        assert got.dtype == dtype
        assert mx.array_equal(got, array).item(), dtype


def check_an_empty_message_arrives(transport: Transport) -> None:
    empty = mx.zeros((0, 8))
    mx.eval(empty)
    assert exchange(transport, empty).shape == (0, 8)


def check_forty_megabytes_go_both_ways_at_once(transport: Transport) -> None:
    array = mx.random.uniform(shape=(FORTY_MEGABYTES,), key=mx.random.key(5))
    mx.eval(array)
    assert mx.array_equal(exchange(transport, array), array).item()


def check_a_large_message_moves_while_nobody_waits(transport: Transport) -> None:
    before, after = neighbours(transport)
    inbox = full(0, (FORTY_MEGABYTES,))
    received = transport.receive(inbox, before, 1)
    sent = transport.send(full(3, (FORTY_MEGABYTES,)), after, 1)
    end = time.monotonic() + transport.timeout
    while not (received.done and sent.done) and time.monotonic() < end:
        time.sleep(0.01)
    assert received.done
    assert sent.done
    assert inbox[-1].item() == 3


def check_a_send_does_not_wait_for_its_receive(transport: Transport) -> None:
    before, after = neighbours(transport)
    sent = transport.send(full(1, (FORTY_MEGABYTES // 4,)), after, 1)
    transport.barrier()
    inbox = full(0, (FORTY_MEGABYTES // 4,))
    wait(transport, transport.receive(inbox, before, 1), sent)
    assert inbox[-1].item() == 1


def check_a_preposted_receive_fills_a_buffer_that_a_lazy_graph_holds(transport: Transport) -> None:
    before, after = neighbours(transport)
    weight = mx.random.normal((8, 8), key=mx.random.key(0))
    cotangent = full(0, (8, 8))
    _, (gradient,) = mx.vjp(lambda w: w * w, [weight], [cotangent])
    received = transport.receive(cotangent, before, 5)
    transport.barrier()
    wait(transport, transport.send(full(transport.rank, (8, 8)), after, 5), received)
    assert mx.array_equal(gradient, 2 * before * weight).item()


def summing(transport: Transport, room: int = 6000) -> Sums:
    """Sums with room for so many numbers: the chunks of two ranks have a quarter of it."""
    return Sums(transport, full(0, (room,)))


def contribution(rank: int, size: int = 100_001) -> np.ndarray:
    """Numbers of all magnitudes: their sum depends on the order."""
    random = np.random.RandomState(rank)
    numbers = random.standard_normal(size) * 10.0 ** random.randint(-9, 9, size)
    return numbers.astype(np.float32)


def in_order(group: Sequence[int], size: int = 100_001) -> np.ndarray:
    """Return the sum of all contributions, in the order of the group, in float32."""
    total = contribution(group[0], size)
    for rank in group[1:]:
        total = total + contribution(rank, size)
    return total


def own(transport: Transport, size: int = 100_001) -> mx.array:
    array = mx.array(contribution(transport.rank, size))
    mx.eval(array)
    return array


def check_sums_add_in_the_order_of_the_ranks_to_the_bit(transport: Transport) -> None:
    world, sums = tuple(range(transport.size)), summing(transport)
    array = own(transport)
    sums.wait(sums.all_reduce(array, world), lambda: "a sum")
    assert np.array(array).tobytes() == in_order(world).tobytes()


def check_it_does_not_matter_who_owns_what(transport: Transport) -> None:
    """Also nothing at all."""
    world, sums = tuple(range(transport.size)), summing(transport)
    last = [100_001] * (transport.size - 1)
    for bounds in ([0, *last, 100_001], [0, 0, *last], [0, *range(7, 6 + transport.size), 100_001]):
        array, mine = own(transport), slice(*bounds[transport.rank : transport.rank + 2])
        sums.wait(sums.reduce_scatter([array], world, [bounds]), lambda: "a scatter")
        assert np.array(array)[mine].tobytes() == in_order(world)[mine].tobytes(), bounds


def check_sums_that_travel_in_bfloat16_are_of_rounded_numbers(transport: Transport) -> None:
    """The same on all ranks; zeros, overflows and what is not a number too."""
    world = tuple(range(transport.size))
    sums = Sums(transport, full(0, (6000,)), WIRE_FORMATS["bfloat16"])

    def short(array: np.ndarray) -> np.ndarray:
        return np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))

    def mine(rank: int) -> np.ndarray:
        numbers = contribution(rank)
        numbers[:4] = 0.0, 3.4e38, np.inf, np.nan
        return numbers

    expected = short(mine(0))
    for rank in world[1:]:
        expected = expected + short(mine(rank))
    array = mx.array(mine(transport.rank))
    mx.eval(array)
    sums.wait(sums.all_reduce(array, world), lambda: "a sum")
    assert np.array_equal(np.array(array), short(expected), equal_nan=True)
    copies = [[full(rank + 1 / 3 if rank == transport.rank else 0)] for rank in world]
    sums.wait(sums.all_gather(copies, world), lambda: "a gather")
    assert all(mx.all(copies[rank][0] == rank + 1 / 3).item() for rank in world), "as they are"


def check_sums_that_travel_in_int8_lose_nothing_for_good(transport: Transport) -> None:
    """They have the same bits on all ranks. A sum is off by half a step of its scales at most; of
    many sums together no more is lost, since what was rounded off comes with the next."""
    world = tuple(range(transport.size))
    sums = Sums(transport, full(0, (6000,)), Int8())
    drawn = [np.random.RandomState(rank).standard_normal(5001).astype(np.float32) for rank in world]
    exact = np.sum(drawn, axis=0)
    errors, got, rounds = full(0, (5001,)), np.zeros(5001, np.float64), 20
    for turn in range(rounds):
        array = mx.array(drawn[transport.rank])
        mx.eval(array)
        sums.wait(sums.all_reduce(array, world, errors), lambda: "a sum")
        total = np.array(array)
        assert len({each.tobytes() for each in transport.all_gather(total)}) == 1
        got += total
        if turn == 0:
            largest = sum(np.abs(each).max() for each in drawn)
            assert 0 < np.abs(total - exact).max() < 2 * largest / 127
    assert np.abs(got / rounds - exact).max() < 3 * largest / 127 / rounds
    array = mx.array(np.where(np.arange(5001) == 4000, np.inf, drawn[transport.rank]))
    mx.eval(array)
    sums.wait(sums.all_reduce(array, world), lambda: "a sum")
    assert not np.isfinite(np.array(array)[4000]), "an overflow stays one"
    assert np.isfinite(np.array(array)[:3000]).all()


def check_arrays_that_belong_to_one_rank_each_are_scattered_together(transport: Transport) -> None:
    world, sums = tuple(range(transport.size)), summing(transport)
    arrays = [own(transport) for _ in world]
    ends = [[0] * (owner + 1) + [100_001] * (transport.size - owner) for owner in world]
    sums.wait(sums.reduce_scatter(arrays, world, ends), lambda: "a scatter")
    assert np.array(arrays[transport.rank]).tobytes() == in_order(world).tobytes()


def check_arrays_of_any_type_are_gathered_from_their_owners(transport: Transport) -> None:
    world, sums = tuple(range(transport.size)), summing(transport)
    dtypes = (mx.float32, mx.bfloat16, mx.uint8)
    owned = [
        [full(rank + 1 if rank == transport.rank else 0, (600, 700), dtype) for dtype in dtypes]
        for rank in world
    ]
    owned[0].append(full(9 if transport.rank == 0 else 0, (3,)))
    sums.wait(sums.all_gather(owned, world), lambda: "a gather")
    for rank in world:
        assert all(mx.all(array == rank + 1).item() for array in owned[rank][:3])
    assert owned[0][3].tolist() == [9, 9, 9]


def check_many_sums_gathers_and_scatters_are_under_way_together(transport: Transport) -> None:
    world, sums = tuple(range(transport.size)), summing(transport)
    bounds = equal_parts(5_001, transport.size)
    mine = slice(bounds[transport.rank], bounds[transport.rank + 1])
    expected = in_order(world, 5_001)
    started = []
    for turn in range(5):
        total, part = own(transport, 5_001), own(transport, 5_001)
        copies = [[full(rank * (rank == transport.rank), (turn, 900))] for rank in world]
        started.append((sums.all_reduce(total, world), total, slice(None)))
        gather = sums.all_gather(copies, world)
        started.append((sums.reduce_scatter([part], world, [bounds]), part, mine))
        if turn % 2:
            sums.wait(gather, lambda: "a gather")
            assert all(mx.all(copy == rank).item() for rank, (copy,) in enumerate(copies))
    for exchange, array, known in reversed(started):
        sums.wait(exchange, lambda: "a sum")
        assert np.array(array)[known].tobytes() == expected[known].tobytes()


def check_sums_of_two_groups_one_after_the_other(transport: Transport) -> None:
    """As replicas of a stage, and then all that hold an embedding. The chunks differ in size."""
    world, sums = tuple(range(transport.size)), summing(transport)
    half = tuple(range(transport.rank % 2, transport.size, 2))
    arrays = [(group, own(transport)) for group in (half, half, world, world)]
    started = [sums.all_reduce(array, group) for group, array in arrays]
    for exchange, (group, array) in zip(started, arrays, strict=True):
        sums.wait(exchange, lambda: "a sum")
        assert np.array(array).tobytes() == in_order(group).tobytes()


def check_a_sum_goes_on_while_nobody_waits(transport: Transport) -> None:
    world = tuple(range(transport.size))
    sums = summing(transport, FORTY_MEGABYTES // 10)
    array = full(1, (FORTY_MEGABYTES,))
    exchange = sums.all_reduce(array, world)
    assert exchange.done.wait(transport.timeout)
    assert array[-1].item() == transport.size
    transport.barrier()


def check_messages_pass_while_a_sum_is_open(transport: Transport) -> None:
    world, sums = tuple(range(transport.size)), summing(transport)
    first, last = 0, transport.size - 1
    array = full(1, (1_000_000,))
    if transport.rank != last:
        exchange = sums.all_reduce(array, world)
    inbox = full(0)
    if transport.rank == first:
        wait(transport, transport.send(full(9), last, 2))
    if transport.rank == last:
        wait(transport, transport.receive(inbox, first, 2))
        assert inbox[0].item() == 9
        exchange = sums.all_reduce(array, world)
    sums.wait(exchange, lambda: "a sum")
    assert array[-1].item() == transport.size


def check_a_sum_of_one_rank_is_what_it_was(transport: Transport) -> None:
    array, sums = full(4), summing(transport)
    sums.wait(sums.all_reduce(array, (transport.rank,)), lambda: "a sum")
    assert array.tolist() == [4, 4, 4, 4]


def check_a_sum_that_lacks_a_rank_names_it(transport: Transport) -> None:
    world, sums = tuple(range(transport.size)), summing(transport)
    last = transport.size - 1
    array, patience = own(transport), transport.timeout
    if transport.rank != last:
        exchange = sums.all_reduce(array, world)
        transport.timeout = SECONDS_TO_ASK
        who = rf"step 3, summing, waiting for rank {last} on \S+: nothing came for 2 s"
        with pytest.raises(TransportTimeout, match=who):
            sums.wait(exchange, lambda: "step 3, summing")
        transport.timeout = patience
    transport.barrier()
    if transport.rank == last:
        exchange = sums.all_reduce(array, world)
    sums.wait(exchange, lambda: "a sum")  # late is not lost
    assert np.array(array).tobytes() == in_order(world).tobytes()


def check_only_float32_is_summed(transport: Transport) -> None:
    with pytest.raises(ValueError, match="float32"):
        summing(transport).all_reduce(full(1, (4,), mx.bfloat16), tuple(range(transport.size)))


def check_objects_go_from_rank_0_to_all_and_from_all_to_it(transport: Transport) -> None:
    assert transport.broadcast("é" * 1000 if transport.rank == 0 else None) == "é" * 1000
    gathered = transport.gather([transport.rank] * transport.rank)
    expected = [[rank] * rank for rank in range(transport.size)]
    assert gathered == (expected if transport.rank == 0 else None)


def check_objects_of_megabytes_gather_on_all_ranks(transport: Transport) -> None:
    values = transport.all_gather(np.full(500_000, transport.rank))
    assert [int(value[-1]) for value in values] == list(range(transport.size))


def check_objects_of_one_sender_keep_their_order(transport: Transport) -> None:
    before, after = neighbours(transport)
    if transport.rank % 2 == 0:
        for i in range(10):
            transport.send_object(i, after)
    if before % 2 == 0:
        assert [transport.receive_object(before) for _ in range(10)] == list(range(10))
    transport.barrier()


def check_nobody_leaves_a_barrier_before_the_last_has_come(transport: Transport) -> None:
    if transport.rank == transport.size - 1:
        time.sleep(0.3)
    came = time.monotonic()
    transport.barrier()
    left = time.monotonic()
    # Threads and ranks of one machine share its clock.
    times = transport.all_gather((came, left))
    assert max(came for came, _ in times) <= min(left for _, left in times)


def check_a_wait_ends_in_time_and_names_what_it_waited_for(transport: Transport) -> None:
    before, after = neighbours(transport)
    inbox = full(0)
    received = transport.receive(inbox, before, 11)
    patience, transport.timeout = transport.timeout, 0.2
    with pytest.raises(TransportTimeout, match=r"stage 1, 1I3, waiting for rank 2: .* 0\.2 s"):
        transport.wait(received, lambda: "stage 1, 1I3, waiting for rank 2")
    transport.timeout = patience
    transport.barrier()
    # Late is not lost.
    wait(transport, transport.send(full(6), after, 11), received)
    assert inbox[0].item() == 6


def check_a_message_longer_than_planned_is_refused_by_its_receiver(transport: Transport) -> None:
    inbox = full(0, (4,))
    if transport.rank == 1:
        received = transport.receive(inbox, 0, 12)
    transport.barrier()
    if transport.rank == 0:
        wait(transport, transport.send(full(1, (8,)), 1, 12))
    if transport.rank == 1:
        time.sleep(0.2)  # whoever drives messages meets the error before we do
        with pytest.raises((ValueError, RuntimeError)):
            wait(transport, received)
    transport.barrier()
    assert exchange(transport, full(2))[0].item() == 2


Check = Callable[[Transport], None]

CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}


def checks(size: int) -> Mapping[str, Check]:
    return CHECKS
