"""The parts of a sum, a scatter or a gather, chunk by chunk, and how much is under way at a time.

Two hosts are fastest with large chunks. Each of three or more sends to all others at once, and each
link carries several streams. If one stream ran far ahead, a link would stand idle waiting for the
slow ones; so only as much is under way as a link carries in a few milliseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from shardmlx.distributed.messages import Handle
from shardmlx.distributed.wire_formats import WireFormat

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
    steps: deque[ExchangeStep] = field(init=False, default_factory=deque)
    left: int = field(init=False, default=0)
    done: threading.Event = field(init=False, default_factory=threading.Event)

    def divide(self, room: int, ahead: int) -> None:
        """Divide the parts into chunks of ``room``, of which ``ahead`` are under way at a time."""
        self.room = room
        self.ahead = ahead
        chunks, errors = (
            zip_longest(*(_pieces(part, room) for part in parts), fillvalue=NOTHING)
            for parts in (self.parts, self.errors)
        )
        for chunk in zip_longest(chunks, errors, fillvalue=()):
            pieces, kept = (dict(zip(self.group, each, strict=False)) for each in chunk)
            self.steps.append(ExchangeStep(self, pieces, kept))
        self.left = len(self.steps)


@dataclass(slots=True)
class ExchangeStep:
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

EVEN = Pace(3, 1 << 18)
"""Pace of three hosts or more: what a link of 1 Gbit/s carries in 2 ms."""


def pace_of(group: Sequence[int], hosts: Sequence[str]) -> Pace:
    """Return the pace of the ranks of a group on ``hosts[rank]``."""
    return EVEN if len({hosts[rank] for rank in group}) > 2 else FULL
