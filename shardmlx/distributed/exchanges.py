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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

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

NOTHING = np.empty(0, np.float32)


Parts = Sequence[Sequence[np.ndarray]]
"""The arrays of each member's part, one after the other."""


@dataclass(slots=True)
class Exchange:
    """A sum, a scatter or a gather under way, over the world ranks of ``group``; ``errors`` are the
    earlier rounding errors of each part, if they are kept."""

    group: tuple[int, ...]
    parts: Parts
    errors: Parts
    scatters: bool
    gathers: bool
    wire: WireFormat
    room: int = 0  # elements of a chunk, or bytes in a gather
    ahead: int = 0  # chunks under way at a time
    steps: deque[Step] = field(init=False, default_factory=deque)
    left: int = field(init=False, default=0)
    done: threading.Event = field(init=False, default_factory=threading.Event)

    def divide(self, room: int, ahead: int) -> None:
        """Divide the parts into chunks of ``room``, of which ``ahead`` are under way at a time."""
        self.room, self.ahead = room, ahead
        chunks, errors = (
            zip_longest(*(_pieces(part, room) for part in parts), fillvalue=NOTHING)
            for parts in (self.parts, self.errors)
        )
        for chunk in zip_longest(chunks, errors, fillvalue=()):
            pieces, kept = (dict(zip(self.group, each, strict=False)) for each in chunk)
            self.steps.append(Step(self, pieces, kept))
        self.left = len(self.steps)


@dataclass(slots=True)
class Step:
    """A chunk of an exchange: a piece of each rank's part, empty where the part has ended."""

    exchange: Exchange
    pieces: Mapping[int, np.ndarray]
    errors: Mapping[int, np.ndarray]  # without error feedback none
    sum: np.ndarray = field(init=False)  # this rank's, as it travels
    sends: list[tuple[int, Handle]] = field(default_factory=list)
    receives: dict[int, tuple[Handle, np.ndarray]] = field(default_factory=dict)


def _pieces(part: Sequence[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the arrays in pieces of at most ``size`` elements; no piece of an empty array."""
    return (array[start : start + size] for array in part for start in range(0, array.size, size))


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
