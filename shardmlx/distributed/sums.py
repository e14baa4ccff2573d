"""Sums and gathers of arrays between the ranks of a group, above ``send`` and ``receive``.

Each member owns a part of the array. It receives the others' contributions, adds them in the order
of the group, in float32, and sends the sum to all, chunk after chunk::

    member     0                       1                       2
    scatter    gets its part of 1, 2   gets its part of 0, 2   gets its part of 0, 1
    add        (a0 + a1) + a2          (b0 + b1) + b2          (c0 + c1) + c2
    gather     gets b and c            gets a and c            gets a and b

Each member sends and receives 2 (n - 1) / n of the array, as in a ring, but in two steps instead of
2 (n - 1). The order of adding does not depend on the owners: any parts give the same bits.

A thread does it while the main thread computes. It has some chunks on their way to their owners,
and as many on their way back; ``exchanges`` says how many.

All members start the same sums in the same order. A rank in several groups starts those of one
before those of the next, all ranks in the same order of groups; so the messages of two ranks pair
up by their order alone, and no rank waits for one that waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

from shardmlx.distributed.exchanges import FULL, Exchange, ExchangeStep, Parts, pace_of
from shardmlx.distributed.messages import Handle, TransportTimeout, buffer_of
from shardmlx.distributed.tags import GATHER_TAG, SCATTER_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.distributed.wire_formats import BLOCK, WIRE_FORMATS, WireFormat

FLOAT32 = WIRE_FORMATS["float32"]

SECONDS_TO_LOOK_HARD = 0.02
"""Seconds in which this thread looks for a chunk as often as the main thread for a message."""

PAUSE = 2e-3
"""Seconds between two looks after that: a peer may compute for minutes before its sum begins."""

SLICE = 0.1
"""Seconds between two looks of the waiting main thread for a failure."""


class Sums:
    """The exchanges of one rank. ``room`` is the float32 buffer for others' contributions, of one
    size on all ranks; larger groups have smaller chunks.

    Contributions and sums travel in the format ``wire``. In bfloat16 a rank rounds its own
    contribution too, so that the bits do not depend on the parts; in int8 they do, since blocks
    begin with the parts.
    """

    def __init__(self, transport: Transport, room: mx.array, wire: WireFormat = FLOAT32) -> None:
        self.wire = wire
        self._transport = transport
        self._room = np.frombuffer(buffer_of(room), np.float32)
        self._queue: deque[Exchange] = deque()
        self._lock = threading.Lock()
        self._runs = False
        self._turn = 0
        self._error: Exception | None = None
        self._awaited: int | None = None
        self._moved = 0

    @property
    def has_failed(self) -> bool:
        """True once an exchange has failed: nothing moves any more, and the next wait says why."""
        return self._error is not None

    def all_reduce(
        self, array: mx.array, group: Sequence[int], errors: mx.array | None = None
    ) -> Exchange:
        """Start summing an evaluated float32 ``array`` (N,) in place, on all members alike.

        ``errors`` (N,) are added to this rank's contribution, and become its rounding errors, kept
        for the next sum of these numbers (1-bit SGD: Seide et al. 2014). All ranks of the group
        must call it.
        """
        bounds = equal_parts(array.size, len(group))
        parts = _parts([array], [bounds])
        kept = _parts([] if errors is None else [errors], [bounds])
        return self.start(Exchange(tuple(group), parts, kept, True, True, self.wire))

    def reduce_scatter(
        self,
        arrays: Sequence[mx.array],
        group: Sequence[int],
        bounds: Sequence[Sequence[int]],
        errors: Sequence[mx.array] = (),
    ) -> Exchange:
        """Start summing ``arrays`` (N,), float32, in place, on each member its own part of each.

        The other parts are then undefined. ``bounds`` are the n + 1 ends of the parts of each
        array, and ``errors`` are as in ``all_reduce``. All ranks of the group must call it.
        """
        parts = _parts(arrays, bounds)
        kept = _parts(errors, bounds)
        return self.start(Exchange(tuple(group), parts, kept, True, False, self.wire))

    def all_gather(self, owned: Sequence[Sequence[mx.array]], group: Sequence[int]) -> Exchange:
        """Start sending each member's arrays, ``owned[member]``, to all: evaluated, of any type.

        Arrays of the others are received into their buffers. All ranks of the group must call it.
        """
        parts = [[np.frombuffer(buffer_of(each), np.uint8) for each in part] for part in owned]
        return self.start(Exchange(tuple(group), parts, (), False, True, FLOAT32))

    def wait(self, exchange: Exchange, what: Callable[[], str]) -> None:
        """Wait for an exchange; ``what`` names the wait.

        Raises ``TransportTimeout``, which names a rank, if nothing has moved for the transport's
        ``patience``; ``PeerLost`` if a link or a peer broke; ``failure`` if there is one.
        """
        transport = self._transport

        def whom() -> str:
            peer = self._awaited
            return what() if peer is None else f"{what()}, waiting for {transport.name(peer)}"

        transport.activity.check(whom)
        idle = 0.0
        moved = self._moved
        with transport.activity.waiting_for(whom):
            while self._error is None and not exchange.done.wait(SLICE):
                transport.activity.check(whom)
                # In slices, since a process that was stopped cannot blame its peers.
                idle, moved = (idle + SLICE if moved == self._moved else 0.0), self._moved
                if idle > transport.patience:
                    raise TransportTimeout(
                        f"{whom()}: nothing came for {transport.patience:g} s (see --timeout)"
                    )
            transport.activity.check(whom, self._error)

    def start(self, exchange: Exchange) -> Exchange:
        """Begin an exchange; return it. All members must, in the same order as others."""
        members = len(exchange.group)
        pace = pace_of(exchange.group, self._transport.hosts)
        room = self._room_of_chunk(members, pace.nbytes) if exchange.scatters else pace.nbytes
        if members > 1:
            exchange.divide(room, pace.ahead)
        if not exchange.steps:
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

    def _room_of_chunk(self, members: int, nbytes: int) -> int:
        """Return the elements of a chunk, for which each other member has a buffer."""
        most = nbytes // self._room.itemsize
        size = max(1, min(most, self._room.size // FULL.ahead // max(1, members - 1)))
        # Whole blocks in int8, so that chunk sizes do not change the bits.
        return size - size % BLOCK if size > BLOCK else size

    def _run(self) -> None:
        """Move exchanges until none is left."""
        posted: deque[ExchangeStep] = deque()
        returned: deque[ExchangeStep] = deque()
        try:
            while True:
                step = self._next(is_last=not (posted or returned))
                if step is None and not (posted or returned):
                    return
                ahead = FULL.ahead if step is None else step.exchange.ahead
                if posted and (step is None or len(posted) >= ahead):
                    oldest = posted.popleft()
                    self._add(oldest)
                    self._return(oldest)
                    returned.append(oldest)
                if returned and (len(returned) > ahead or (step is None and not posted)):
                    self._finish(returned.popleft())
                if step is not None:
                    self._scatter(step)
                    posted.append(step)
        except Exception as error:
            self._error = error  # the main thread's next wait raises it

    def _next(self, *, is_last: bool) -> ExchangeStep | None:
        """Return the next chunk of an exchange; without any, and ``is_last``, this thread ends."""
        with self._lock:
            if not self._queue:
                self._runs = not is_last
                return None
            exchange = self._queue[0]
            step = exchange.steps.popleft()
            if not exchange.steps:
                self._queue.popleft()
        return step

    def _scatter(self, step: ExchangeStep) -> None:
        """Send the others their pieces of a chunk, and receive this rank's."""
        exchange = step.exchange
        transport = self._transport
        if not exchange.scatters:
            return
        self._turn = (self._turn + 1) % FULL.ahead
        size = step.pieces[transport.rank].size
        for place, peer in enumerate(self._others(exchange)):
            if size:
                start = 4 * (self._room.size // FULL.ahead * self._turn + exchange.room * place)
                inbox = self._room.view(np.uint8)[start : start + exchange.wire.nbytes(size)]
                step.receives[peer] = transport.receive(inbox, peer, SCATTER_TAG), inbox
            self._send(step, peer, self._encoded(step, peer), SCATTER_TAG)

    def _add(self, step: ExchangeStep) -> None:
        """Add the received pieces to this rank's own, in the order of the group."""
        exchange = step.exchange
        me = self._transport.rank
        wire = step.exchange.wire
        mine = step.pieces[me]
        rounds = wire.is_shorter and not wire.keeps_errors
        if rounds:
            mine[:] = wire.decode(wire.encode(mine), mine.size)
        total: np.ndarray | None = None
        for rank in exchange.group:
            if rank in step.receives:
                handle, inbox = step.receives.pop(rank)
                self._await(handle, rank)
                each = wire.decode(inbox, mine.size)
            elif rank == me and exchange.scatters:
                each = mine
            else:
                continue
            # Add into this rank's own piece, so that the sum ends there.
            into = mine if each is mine else total
            # An infinite gradient is found by the norm, and needs no warning here.
            with np.errstate(invalid="ignore", over="ignore"):
                total = each if total is None else np.add(total, each, out=into)
        step.sum = mine
        if rounds or (wire.is_shorter and exchange.gathers):
            step.sum = self._encoded(step, me)
            mine[:] = wire.decode(step.sum, mine.size)
        self._end_sends(step)

    def _return(self, step: ExchangeStep) -> None:
        """Send this rank's sum to all, and receive theirs in place of the pieces sent."""
        exchange = step.exchange
        wire = step.exchange.wire
        if not exchange.gathers:
            return
        for peer in self._others(exchange):
            inbox = piece = step.pieces[peer]
            if piece.size:
                if wire.is_shorter:
                    inbox = np.empty(wire.nbytes(piece.size), np.uint8)
                step.receives[peer] = self._transport.receive(inbox, peer, GATHER_TAG), inbox
            self._send(step, peer, step.sum, GATHER_TAG)

    def _finish(self, step: ExchangeStep) -> None:
        """End the messages of ``_return``, and with the last chunk the exchange."""
        exchange = step.exchange
        for peer, (handle, inbox) in step.receives.items():
            self._await(handle, peer)
            if exchange.wire.is_shorter:
                step.pieces[peer][:] = exchange.wire.decode(inbox, step.pieces[peer].size)
        self._end_sends(step)
        exchange.left -= 1
        if exchange.left == 0:
            exchange.done.set()

    def _encoded(self, step: ExchangeStep, rank: int) -> np.ndarray:
        """Return a rank's piece as it travels, and keep its rounding errors."""
        piece = step.pieces[rank]
        wire = step.exchange.wire
        if rank not in step.errors:
            return wire.encode(piece)
        errors = step.errors[rank]
        errors += piece
        data = wire.encode(errors)
        errors -= wire.decode(data, piece.size)
        return data

    def _send(self, step: ExchangeStep, peer: int, piece: np.ndarray, tag: int) -> None:
        if piece.size:
            step.sends.append((peer, self._transport.send(piece, peer, tag)))

    def _end_sends(self, step: ExchangeStep) -> None:
        for peer, handle in step.sends:
            self._await(handle, peer)
        step.sends.clear()

    def _await(self, handle: Handle, peer: int) -> None:
        """End a message, without a limit: the main thread has one once it waits."""
        transport = self._transport
        self._awaited = peer
        if not (handle.done or transport.progress(handle, SECONDS_TO_LOOK_HARD)):
            while not transport.progress(handle, 0.0):
                if transport.activity.failure is not None:
                    raise transport.activity.failure
                time.sleep(PAUSE)
        self._awaited = None
        self._moved += 1

    def _others(self, exchange: Exchange) -> Iterator[int]:
        """Yield the other members, the next one first, so that not all send to one at a time."""
        group = exchange.group
        me = group.index(self._transport.rank)
        return (group[(me + distance) % len(group)] for distance in range(1, len(group)))


def equal_parts(size: int, members: int) -> list[int]:
    """Return the ends of nearly equal parts of ``size`` elements: 0, ..., size."""
    return [size * member // members for member in range(members + 1)]


def _parts(arrays: Sequence[mx.array], bounds: Sequence[Sequence[int]]) -> Parts:
    """Return each member's parts of the arrays, which end at ``bounds``."""
    parts = []
    for array, ends in zip(arrays, bounds if arrays else (), strict=True):
        if array.dtype != mx.float32:
            raise ValueError(f"sums are in float32, not {array.dtype}")
        whole = np.frombuffer(buffer_of(array), np.float32)
        parts.append([whole[start:stop] for start, stop in pairwise(ends)])
    return list(zip(*parts, strict=True))
