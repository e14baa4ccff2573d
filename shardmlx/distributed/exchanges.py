"""The parts of a sum, a scatter or a gather, chunk by chunk, and how much is under way at a time.

Two hosts are fastest with large chunks. Each of three or more sends to all others at once, and each
link carries several streams. If one stream ran far ahead, a link would stand idle waiting for the
slow ones; so only as much is under way as a link carries in a few milliseconds, by a measurement.
At 100 Mbit/s, as multiples of the bound, chunks of 512 KiB took 1.2, and of 24 KiB 1.07.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import SCATTER_TAG, Handle
from shardmlx.distributed.transport import Transport
from shardmlx.distributed.wire_formats import WireFormat

SECONDS_OF_CHUNK = 1.8e-3
"""Seconds in which a link carries a chunk, beside the latency."""

LEAST_BYTES = 1 << 12

SAMPLE_BYTES = 1 << 18
"""Size of the measured message: a fiftieth of a second at 100 Mbit/s."""

ROUNDS = 3


@dataclass(slots=True)
class Exchange:
    """A sum, a scatter or a gather under way, over the world ranks of ``group``.

    ``chunks`` are the parts of all members, chunk by chunk, ``errors`` their earlier rounding
    errors. The arrays are in use until the exchange is done.
    """

    group: tuple[int, ...]
    scatters: bool
    gathers: bool
    chunks: deque[tuple[np.ndarray | None, ...]]
    errors: deque[tuple[np.ndarray | None, ...]]  # None without error feedback
    arrays: Sequence[mx.array]  # keeps the buffers alive
    left: int
    wire: WireFormat | None
    after: Exchange | None  # the exchange whose result this one begins with
    room: int  # elements of a chunk, or bytes in a gather
    ahead: int  # chunks under way at a time
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Step:
    """A chunk of an exchange: one piece of each member's part, as long as it lasts."""

    exchange: Exchange
    pieces: tuple[np.ndarray | None, ...]
    errors: tuple[np.ndarray | None, ...] = ()
    sum: np.ndarray | None = None  # this rank's, as it travels
    sends: list[tuple[int, Handle]] = field(default_factory=list)
    receives: dict[int, tuple[Handle, np.ndarray]] = field(default_factory=dict)


def pieces_of(part: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Return the arrays in pieces of at most ``size`` elements; no piece of an empty array."""
    return [array[start : start + size] for array in part for start in range(0, array.size, size)]


@dataclass(frozen=True, slots=True)
class Pace:
    """Chunks on their way to a rank at a time: ``ahead``, each of at most ``nbytes``."""

    ahead: int
    nbytes: int


FULL = Pace(8, 1 << 19)
"""Pace of two hosts, and of the ranks of one, with the least overhead."""


def pace_between_hosts(transport: Transport, room: np.ndarray) -> Pace:
    """Measure how fast all ranks send, each to the next, and return the pace of sums of three hosts
    or more; ``room`` is overwritten.

    All ranks must call it, and get the same pace.
    """
    if len(set(transport.hosts)) < 3:
        return FULL
    count = SAMPLE_BYTES // room.itemsize
    if min(transport.all_gather(room.size, "measuring links")) < 2 * count:
        return FULL  # a rank without a buffer sums nothing
    small, large = [], []
    for _ in range(ROUNDS):
        # The small message also lets neighbours begin together.
        small.append(_seconds(transport, room[0:1], room[1:2]))
        large.append(_seconds(transport, room[:count], room[count : 2 * count]))
    latency = min(small)
    speed = SAMPLE_BYTES / max(min(large) - latency, 1e-6)
    chunk = int(speed * (SECONDS_OF_CHUNK + latency))
    slowest = min(transport.all_gather(chunk, "measuring links"))
    return Pace(3, max(LEAST_BYTES, min(FULL.nbytes, slowest)))


def pace_of(group: Sequence[int], hosts: Sequence[str], between: Pace) -> Pace:
    """Return the pace of the ranks of a group on ``hosts[rank]``."""
    return between if len({hosts[rank] for rank in group}) > 2 else FULL


def _seconds(transport: Transport, out: np.ndarray, into: np.ndarray) -> float:
    """Return how long it takes to send to the next rank while the one before sends."""
    rank, size = transport.rank, transport.size
    before, after = (rank - 1) % size, (rank + 1) % size
    who = f"{transport.name(rank)}, measuring links"
    start = time.monotonic()
    received = transport.receive(into, before, SCATTER_TAG)
    sent = transport.send(out, after, SCATTER_TAG)
    transport.wait(received, lambda: f"{who}, waiting for {transport.name(before)}")
    transport.wait(sent, lambda: f"{who}, sending to {transport.name(after)}")
    return time.monotonic() - start
