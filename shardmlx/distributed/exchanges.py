"""The parts of a sum, a scatter or a gather, chunk by chunk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import Handle
from shardmlx.distributed.wire_formats import WireFormat


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
