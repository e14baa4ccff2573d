"""Measures the link of two ranks, and how fast this machine multiplies matrices."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import (
    FIRST_ENGINE_TAG,
    Array,
    Handle,
    TransportTimeout,
    new_buffer,
)
from shardmlx.distributed.transport import Transport
from shardmlx.hosts.findings import LinkSpeed

SECONDS_OF_PINGS = 0.3
FEWEST_PINGS, MOST_PINGS = 5, 400
WARM_UPS = 5  # messages before measuring: the first open the connection

SMALLEST_BYTES, LARGEST_BYTES = 1 << 16, 1 << 26  # a transfer: up to a large micro-batch
TRANSFERS_A_MEASUREMENT = 2  # at least, of the measured size

LARGEST_MATRIX = 4096
RUNS_OF_A_MATRIX = 3


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
    transport: Transport,
    first: int,
    second: int,
    seconds: float,
) -> LinkSpeed | str | None:
    """Measure the link of two ranks, ``seconds`` in each direction; return the speed on ``first``,
    and None on ``second``, or the wait that timed out. Both ranks must call it."""
    is_first = transport.rank == first
    # One tag per link, so that leftovers of a failed link are not taken for another's messages.
    tag = FIRST_ENGINE_TAG + first * transport.size + second
    peer = _LinkEnd(transport, second if is_first else first, tag)
    try:
        if is_first:
            latency = _ping(peer)
            there = _push(peer, seconds, latency)
            _pull(peer)
            return LinkSpeed(latency=latency, there=there, back=peer.hear())
        latency = _pong(peer)
        _pull(peer)
        peer.say(_push(peer, seconds, latency))
    except TransportTimeout as timeout:
        return str(timeout)
    return None


def _ping(peer: _LinkEnd) -> float:
    """Return half of the median round trip."""

    def round_trip() -> float:
        start = time.perf_counter()
        peer.say(0)
        peer.hear()
        return time.perf_counter() - start

    warm = min(round_trip() for _ in range(WARM_UPS))
    count = min(max(int(SECONDS_OF_PINGS / max(warm, 1e-9)), FEWEST_PINGS), MOST_PINGS)
    peer.say(count)
    latency = statistics.median(round_trip() for _ in range(count)) / 2
    peer.say(latency)
    return latency


def _pong(peer: _LinkEnd) -> float:
    """Answer ``_ping``; return the latency that the other end has found."""

    def answer(count: int) -> None:
        for _ in range(count):
            peer.say(peer.hear())

    answer(WARM_UPS)
    answer(int(peer.hear()))
    return peer.hear()


def _push(peer: _LinkEnd, seconds: float, latency: float) -> float:
    """Return the bytes a second that go to the other end, which calls ``_pull``."""
    size, rates, end = SMALLEST_BYTES, list[float](), time.perf_counter() + seconds
    data = new_buffer((size,), mx.uint8)
    while True:
        peer.say(size)
        start = time.perf_counter()
        peer.send(data)
        peer.hear()
        now = time.perf_counter()
        # The final message, which confirms everything, takes a latency of its own.
        taken = max(now - start - latency, 1e-9)
        rates.append(size / taken)
        larger = 4 * size
        if larger <= LARGEST_BYTES and 4 * taken * TRANSFERS_A_MEASUREMENT <= end - now:
            size, rates = larger, []
            data = new_buffer((size,), mx.uint8)
        elif now >= end and len(rates) >= TRANSFERS_A_MEASUREMENT:
            break
    peer.say(0)
    return statistics.median(rates)


def _pull(peer: _LinkEnd) -> None:
    """Take the messages of ``_push``."""
    data = new_buffer((0,), mx.uint8)
    while size := int(peer.hear()):
        if data.size != size:
            data = new_buffer((size,), mx.uint8)
        peer.receive(data)
        peer.say(1)


def matmul_flops(dtype: mx.Dtype, seconds: float) -> float:
    """Return the FLOP/s of square matrix products of the size that suits the default device."""
    size, rates, end = 256, list[float](), time.perf_counter() + seconds
    a = _matrix(size, dtype)
    while True:
        start = time.perf_counter()
        mx.eval(a @ a)
        now = time.perf_counter()
        rates.append(2 * size**3 / (now - start))
        # Large enough that starting takes no time; the first run of a size compiles.
        larger = size < LARGEST_MATRIX and 8 * (now - start) * RUNS_OF_A_MATRIX < end - now
        if larger and len(rates) > 1:
            size, rates = 2 * size, []
            a = _matrix(size, dtype)
        elif now >= end and len(rates) >= RUNS_OF_A_MATRIX:
            return statistics.median(rates)


def _matrix(size: int, dtype: mx.Dtype) -> mx.array:
    array = (mx.random.uniform(shape=(size, size)) - 0.5).astype(dtype)
    mx.eval(array)
    return array
