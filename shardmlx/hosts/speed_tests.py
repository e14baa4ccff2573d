"""Measures the link of two ranks, and how fast this machine multiplies matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import Array, Handle, TransportTimeout, new_buffer
from shardmlx.distributed.tags import FIRST_ENGINE_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.hosts.findings import LinkSpeed

SECONDS_OF_PINGS = 0.3

TRANSFERS = tuple(1 << bits for bits in range(16, 27, 2))
"""Bytes of transfers, up to a large micro-batch."""

MATRICES = (256, 512, 1024, 2048, 4096)
"""Rows and columns of matrices."""

RUNS = 3
"""Measurements of a size, at least."""

_END = -1
"""The word, in the place of a size, that nothing more comes."""


class _LinkEnd:
    """The other end of a link, for one thread and one link."""

    def __init__(self, transport: Transport, rank: int, tag: int) -> None:
        self._transport = transport
        self._rank = rank
        self._tag = tag
        self._number = np.zeros(1, np.float64)

    def send(self, array: Array) -> None:
        self._wait(self._transport.send(array, self._rank, self._tag), "sending to")

    def receive(self, array: Array) -> None:
        self._wait(self._transport.receive(array, self._rank, self._tag), "waiting for")

    def _wait(self, handle: Handle, what: str) -> None:
        me, other = map(self._transport.name, (self._transport.rank, self._rank))
        self._transport.wait(handle, lambda: f"{me}, testing the link, {what} {other}")

    def say(self, number: float) -> None:
        self._number[0] = number
        self.send(self._number)

    def hear(self) -> float:
        self.receive(self._number)
        return float(self._number[0])


def measure_link(
    transport: Transport, first: int, second: int, seconds: float
) -> LinkSpeed | str | None:
    """Measure the link of two ranks, ``seconds`` in each direction; return the speed on ``first``,
    and None on ``second``, or the wait that timed out. Both ranks must call it."""
    is_first = transport.rank == first
    # One tag per link, so that leftovers of a failed link are not taken for another's messages.
    tag = FIRST_ENGINE_TAG + first * transport.size + second
    peer = _LinkEnd(transport, second if is_first else first, tag)
    try:
        if is_first:
            latency, there = _push(peer, seconds)
            _pull(peer)
            return LinkSpeed(latency=latency, there=there, back=peer.hear())
        _pull(peer)
        _, back = _push(peer, seconds)
        peer.say(back)
    except TransportTimeout as timeout:
        return str(timeout)
    return None


def _push(peer: _LinkEnd, seconds: float) -> tuple[float, float]:
    """Return half of the median round trip, and the bytes a second that go to the other end, which
    calls ``_pull``."""

    def transfer(size: int) -> Callable[[], None]:
        data = new_buffer((size,), mx.uint8)

        def run() -> None:
            peer.say(size)
            if size:
                peer.send(data)
            peer.hear()

        return run

    _, round_trip = _median_seconds(transfer, (0,), 1, SECONDS_OF_PINGS)
    size, taken = _median_seconds(transfer, TRANSFERS, 4, seconds)
    peer.say(_END)
    return round_trip / 2, bandwidth(size, taken, round_trip)


def bandwidth(size: int, taken: float, round_trip: float) -> float:
    """Return the bytes a second of a link on which ``size`` bytes and their answer took so many
    seconds. ``round_trip`` counts for half of them at most: on a busy machine an empty message, at
    another moment, may have taken longer than these bytes."""
    return size / max(taken - round_trip, taken / 2)


def _pull(peer: _LinkEnd) -> None:
    """Take the messages of ``_push``."""
    data = new_buffer((0,), mx.uint8)
    while (size := int(peer.hear())) != _END:
        if data.size != size:
            data = new_buffer((size,), mx.uint8)
        if size:
            peer.receive(data)
        peer.say(1)


def _median_seconds(
    prepare: Callable[[int], Callable[[], None]], sizes: Sequence[int], growth: int, seconds: float
) -> tuple[int, float]:
    """Return a size, and the median time that ``prepare(size)()`` takes.

    For ``seconds`` it runs, at the largest of ``sizes`` of which ``RUNS`` fit: each takes
    ``growth`` times as long as the one before.
    """
    larger, end = iter(sizes[1:]), time.perf_counter() + seconds
    size, taken = sizes[0], list[float]()
    run = prepare(size)
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        taken.append(now - start)
        # The first run of a size compiles, or opens the connection.
        fits = len(taken) > 1 and growth * taken[-1] * RUNS < end - now
        if fits and (following := next(larger, None)) is not None:
            size, taken = following, []
            run = prepare(size)
        elif now >= end and len(taken) >= RUNS:
            return size, statistics.median(taken)


def matmul_flops(dtype: mx.Dtype, seconds: float) -> float:
    """Return the FLOP/s of square matrix products of the size that suits the default device."""

    def product(size: int) -> Callable[[], None]:
        a = (mx.random.uniform(shape=(size, size)) - 0.5).astype(dtype)
        mx.eval(a)
        return lambda: mx.eval(a @ a)

    size, taken = _median_seconds(product, MATRICES, 8, seconds)
    return 2 * size**3 / taken
