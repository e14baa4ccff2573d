"""Sums and gathers of arrays between the ranks of a group, above ``send`` and ``receive``.

Each member owns a part of the array. It receives what the others have for its part, adds in the
order of the group, in float32, and sends the sum to all, chunk after chunk::

    member     0                       1                       2
    scatter    gets its part of 1, 2   gets its part of 0, 2   gets its part of 0, 1
    add        (a0 + a1) + a2          (b0 + b1) + b2          (c0 + c1) + c2
    gather     gets b and c            gets a and c            gets a and b

Each member sends and receives 2 (n - 1) / n of the array, as in a ring, but in two steps instead of
2 (n - 1). The order of adding does not depend on who owns what: any parts give the same bits.

A thread does it, so that the main thread computes meanwhile. It has ``AHEAD`` chunks on their way
to their owners, and as many on their way back::

    chunk      0        1        2        3        4        5
    thread     scatter  scatter  scatter  scatter  scatter  ...
                                                   add, gather
                                                            add, gather

All members start the same sums in the same order. A rank in several groups starts those of one
before those of the next, all ranks in the same order of groups; so the messages of two ranks pair
up by their order alone, and no rank waits for one that waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import (
    GATHER_TAG,
    SCATTER_TAG,
    Handle,
    PeerLost,
    TransportTimeout,
    buffer_of,
)
from shardmlx.distributed.transport import Transport
from shardmlx.distributed.wire_formats import WireFormat

AHEAD = 8
"""Chunks whose contributions are on their way at a time."""

MOST_CHUNK_BYTES = 1 << 19
"""Size of a chunk, where that many of all members fit into the buffer."""

SECONDS_TO_LOOK_HARD = 0.02
"""Seconds for which a chunk is looked for as often as a message that the main thread waits for."""

PAUSE = 2e-3
"""Seconds between two looks after that: a peer may compute for minutes before its sum begins."""

SLICE = 0.1
"""Seconds between two looks of the main thread, which waits, at what may have failed meanwhile."""


@dataclass(slots=True)
class Exchange:
    """A sum, a scatter or a gather under way, over the world ranks of ``group``.

    ``chunks`` are the parts of all members, chunk by chunk, ``errors`` what was rounded off of
    them before. Its arrays are in use until it is done.
    """

    group: tuple[int, ...]
    scatters: bool
    gathers: bool
    chunks: deque[tuple[np.ndarray | None, ...]]
    errors: deque[tuple[np.ndarray | None, ...]]  # none where none are kept
    arrays: Sequence[mx.array | None]  # keeps the buffers alive
    left: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Step:
    """A chunk of an exchange: one piece of each member's part, as far as that goes."""

    exchange: Exchange
    pieces: tuple[np.ndarray | None, ...]
    errors: tuple[np.ndarray | None, ...] = ()
    sum: np.ndarray | None = None  # this rank's, as it travels
    sends: list[tuple[int, Handle]] = field(default_factory=list)
    receives: dict[int, tuple[Handle, np.ndarray]] = field(default_factory=dict)


class Sums:
    """The exchanges of one rank. ``room`` is the buffer, float32, for what others contribute; it is
    of one size on all ranks, and the chunks of larger groups are smaller.

    Contributions and sums travel as ``wire`` has them. In bfloat16 a rank rounds its own as well,
    so that the bits depend on nobody's part; in int8 blocks begin with the parts, and they do.
    """

    def __init__(
        self, transport: Transport, room: mx.array, *, wire: WireFormat | None = None
    ) -> None:
        self._transport = transport
        self._wire = wire
        self._room = np.frombuffer(buffer_of(room), np.float32)
        self._queue: deque[Exchange] = deque()
        self._lock = threading.Lock()
        self._runs = False
        self._turn = 0
        self._error: Exception | None = None
        self._awaited: int | None = None
        self._moved = 0

    def all_reduce(
        self,
        array: mx.array,
        group: Sequence[int],
        bounds: Sequence[int] | None = None,
        errors: mx.array | None = None,
    ) -> Exchange:
        """Start summing an evaluated float32 ``array`` (N,) in place, on all members alike.

        ``bounds`` are the n + 1 ends of the parts, by default of equal parts. ``errors`` (N,) are
        added to what leaves this rank, and become what is then rounded off of it: kept from one
        sum of these numbers to the next (1-bit SGD: Seide et al. 2014). All ranks of the group
        must call it.
        """
        bounds = equal_parts(array.size, len(group)) if bounds is None else bounds
        parts = self._parts(array, bounds), self._parts(errors, bounds)
        return self._start(group, *parts, [array, errors], scatters=True, gathers=True)

    def reduce_scatter(
        self,
        array: mx.array,
        group: Sequence[int],
        bounds: Sequence[int],
        errors: mx.array | None = None,
    ) -> Exchange:
        """Start summing ``array`` (N,), float32, in place, on each member its own part.

        What is in the other parts then means nothing. ``errors`` are those of ``all_reduce``. All
        ranks of the group must call it.
        """
        parts = self._parts(array, bounds), self._parts(errors, bounds)
        return self._start(group, *parts, [array, errors], scatters=True, gathers=False)

    def all_gather(self, owned: Sequence[Sequence[mx.array]], group: Sequence[int]) -> Exchange:
        """Start sending each member's arrays, ``owned[member]``, to all: evaluated, of any type.

        Those of the others are received into their buffers. All ranks of the group must call it.
        """
        parts = [[np.frombuffer(buffer_of(each), np.uint8) for each in part] for part in owned]
        arrays = [each for part in owned for each in part]
        return self._start(group, parts, [], arrays, scatters=False, gathers=True)

    def wait(self, exchange: Exchange, what: Callable[[], str]) -> None:
        """Return once an exchange is done; ``what`` says for whom it waits.

        Raises ``TransportTimeout``, which names a rank, where nothing has moved for the transport's
        timeout; ``PeerLost`` where a link or a peer broke; ``failure`` if there is one.
        """
        transport = self._transport

        def whom() -> str:
            peer = self._awaited
            return what() if peer is None else f"{what()}, waiting for {transport.name(peer)}"

        transport.check(whom)
        idle, moved = 0.0, self._moved
        with transport.activity.waiting_for(whom):
            while self._error is None and not exchange.done.wait(SLICE):
                transport.check(whom)
                # By slices: a process that was stopped cannot blame its peers.
                idle, moved = (idle + SLICE if moved == self._moved else 0.0), self._moved
                if idle > transport.timeout:
                    raise TransportTimeout(
                        f"{whom()}: nothing came for {transport.timeout:g} s (see --timeout)"
                    )
            if isinstance(self._error, PeerLost):
                raise PeerLost(f"{whom()}: {self._error}") from self._error
            if self._error is not None:
                raise self._error

    def _parts(self, array: mx.array | None, bounds: Sequence[int]) -> list[list[np.ndarray]]:
        if array is None:
            return []
        if array.dtype != mx.float32:
            raise ValueError(f"sums are in float32, not {array.dtype}")
        whole = np.frombuffer(buffer_of(array), np.float32)
        return [[whole[start:stop]] for start, stop in pairwise(bounds)]

    def _start(
        self,
        group: Sequence[int],
        parts: Sequence[Sequence[np.ndarray]],
        errors: Sequence[Sequence[np.ndarray]],
        arrays: Sequence[mx.array | None],
        *,
        scatters: bool,
        gathers: bool,
    ) -> Exchange:
        if len(parts) != len(group):
            raise ValueError(f"{len(parts)} parts for {len(group)} ranks")
        room = self._room_of_chunk(len(group)) if scatters else MOST_CHUNK_BYTES
        chunks, of_errors = (
            deque(zip_longest(*(_pieces(part, room) for part in each))) for each in (parts, errors)
        )
        if len(group) == 1:
            chunks.clear()
        exchange = Exchange(tuple(group), scatters, gathers, chunks, of_errors, arrays, len(chunks))
        if not chunks:
            exchange.done.set()
            return exchange
        with self._lock:
            if self._error is not None:
                raise self._error
            self._queue.append(exchange)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="sums", daemon=True).start()
        return exchange

    def _room_of_chunk(self, members: int) -> int:
        """Return the elements of a chunk, of which ``AHEAD`` of each other member have room."""
        most = MOST_CHUNK_BYTES // self._room.itemsize
        return max(1, min(most, self._room.size // AHEAD // max(1, members - 1)))

    def _run(self) -> None:
        """Move exchanges until there are none."""
        posted: deque[_Step] = deque()
        returned: deque[_Step] = deque()
        try:
            while True:
                step = self._next(is_last=not (posted or returned))
                if step is None and not (posted or returned):
                    return
                if posted and (step is None or len(posted) == AHEAD):
                    oldest = posted.popleft()
                    self._add(oldest)
                    self._return(oldest)
                    returned.append(oldest)
                elif returned and (step is None or len(returned) > AHEAD):
                    self._finish(returned.popleft())
                if step is not None:
                    self._scatter(step)
                    posted.append(step)
        except Exception as error:
            self._error = error  # the main thread's next wait raises it

    def _next(self, *, is_last: bool) -> _Step | None:
        """Return the next chunk, if any exchange has one; without, this thread ends if it was the
        last."""
        with self._lock:
            if not self._queue:
                self._runs = not is_last
                return None
            exchange = self._queue[0]
            pieces = exchange.chunks.popleft()
            errors = exchange.errors.popleft() if exchange.errors else ()
            if not exchange.chunks:
                self._queue.popleft()
        return _Step(exchange, pieces, errors)

    def _scatter(self, step: _Step) -> None:
        """Send the others what is theirs of a chunk, and receive what is this rank's."""
        exchange = step.exchange
        if not exchange.scatters:
            return
        self._turn = (self._turn + 1) % AHEAD
        mine, room = step.pieces[self._member(exchange)], self._room_of_chunk(len(exchange.group))
        for place, peer in enumerate(self._others(exchange)):
            if mine is not None:
                start = self._room.size // AHEAD * self._turn + room * place
                inbox: np.ndarray = self._room[start : start + mine.size]
                if self._wire is not None:
                    nbytes = self._wire.nbytes(mine.size)
                    inbox = self._room.view(np.uint8)[4 * start : 4 * start + nbytes]
                handle = self._transport.receive(inbox, peer, SCATTER_TAG)
                step.receives[peer] = handle, inbox
            self._send(step, peer, self._encoded(step, peer), SCATTER_TAG)

    def _add(self, step: _Step) -> None:
        """Add what has come to this rank's own, in the order of the group."""
        exchange, wire, me = step.exchange, self._wire, self._transport.rank
        mine = step.pieces[self._member(exchange)]
        rounds = wire is not None and not wire.keeps_errors and exchange.scatters
        if rounds and wire is not None and mine is not None:
            mine[:] = wire.decode(wire.encode(mine), mine.size)
        total: np.ndarray | None = None
        for rank in exchange.group:
            if rank in step.receives:
                handle, inbox = step.receives.pop(rank)
                self._await(handle, rank)
                each = inbox
                if wire is not None and mine is not None:
                    each = wire.decode(inbox, mine.size)
            elif rank == me and exchange.scatters and mine is not None:
                each = mine
            else:
                continue
            # Into this rank's own where that is one of the two, so that it ends there.
            into = mine if each is mine else total
            total = each if total is None else np.add(total, each, out=into)
        step.sum = mine
        if wire is not None and mine is not None and (rounds or exchange.gathers):
            step.sum = self._encoded(step, me)
            if exchange.scatters and step.sum is not None:
                mine[:] = wire.decode(step.sum, mine.size)
        self._end_sends(step)

    def _return(self, step: _Step) -> None:
        """Send this rank's piece to all, and receive theirs in the place of what they were sent."""
        exchange = step.exchange
        if not exchange.gathers:
            return
        for peer in self._others(exchange):
            piece = step.pieces[exchange.group.index(peer)]
            if piece is not None:
                inbox = piece
                if self._wire is not None and exchange.scatters:
                    inbox = np.empty(self._wire.nbytes(piece.size), np.uint8)
                step.receives[peer] = self._transport.receive(inbox, peer, GATHER_TAG), inbox
            self._send(step, peer, step.sum, GATHER_TAG)

    def _finish(self, step: _Step) -> None:
        """End what ``_return`` began, and with its last chunk the exchange."""
        for peer, (handle, inbox) in step.receives.items():
            self._await(handle, peer)
            piece = step.pieces[step.exchange.group.index(peer)]
            if self._wire is not None and piece is not None and inbox is not piece:
                piece[:] = self._wire.decode(inbox, piece.size)
        self._end_sends(step)
        step.exchange.left -= 1
        if step.exchange.left == 0:
            step.exchange.done.set()

    def _encoded(self, step: _Step, rank: int) -> np.ndarray | None:
        """Return a member's piece as it travels; what is rounded off of it is kept."""
        member = step.exchange.group.index(rank)
        piece, wire = step.pieces[member], self._wire
        if piece is None or wire is None or not step.exchange.scatters:
            return piece
        errors = step.errors[member] if step.errors else None
        if errors is None:
            return wire.encode(piece)
        errors += piece
        data = wire.encode(errors)
        errors -= wire.decode(data, piece.size)
        return data

    def _send(self, step: _Step, peer: int, piece: np.ndarray | None, tag: int) -> None:
        if piece is not None:
            step.sends.append((peer, self._transport.send(piece, peer, tag)))

    def _end_sends(self, step: _Step) -> None:
        for peer, handle in step.sends:
            self._await(handle, peer)
        step.sends.clear()

    def _await(self, handle: Handle, peer: int) -> None:
        """End a message. Without a limit: the main thread has one, once it waits."""
        transport = self._transport
        self._awaited = peer
        if not (handle.done or transport.progress(handle, SECONDS_TO_LOOK_HARD)):
            while not transport.progress(handle, 0.0):
                if transport.failure is not None:
                    raise transport.failure
                time.sleep(PAUSE)
        self._awaited = None
        self._moved += 1

    def _member(self, exchange: Exchange) -> int:
        return exchange.group.index(self._transport.rank)

    def _others(self, exchange: Exchange) -> Iterator[int]:
        """Yield the other members, the next one first: so not all send to one at a time."""
        group, me = exchange.group, self._member(exchange)
        return (group[(me + distance) % len(group)] for distance in range(1, len(group)))


def equal_parts(size: int, members: int) -> list[int]:
    """Return the ends of parts of ``size`` elements that differ by one at most: 0, ..., size."""
    return [size * member // members for member in range(members + 1)]


def parts_by_speed(size: int, speeds: Sequence[float]) -> list[int]:
    """Return the ends of parts with which the slowest link is through first: 0, ..., size.

    Of n members, number i sends and receives ``size`` + (n - 2) times its part, at ``speeds[i]``:
    links are all through at the time T where the parts, (T speed - size) / (n - 2), add up to
    ``size``. A link that is too slow for that owns nothing.
    """
    members = len(speeds)
    if members <= 2 or min(speeds) == max(speeds):
        return equal_parts(size, members)
    own = sorted(speeds, reverse=True)
    while (members - 2 + len(own)) / sum(own) * own[-1] < 1:
        own.pop()
    time = (members - 2 + len(own)) / sum(own)
    shares = [max(0.0, time * speed - 1) / (members - 2) for speed in speeds]
    return [min(size, round(size * end / sum(shares))) for end in accumulate(shares, initial=0.0)]


def _pieces(part: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Return the arrays in pieces of at most ``size`` elements; none of what is empty."""
    return [array[start : start + size] for array in part for start in range(0, array.size, size)]
