"""Send long runs of bytes from rank to rank in pieces: neither side holds more than three."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from shardmlx.distributed.messages import Handle, buffer_of
from shardmlx.distributed.transport import Transport

PIECE_BYTES = 16 << 20


class Outgoing:
    """A stream of ``nbytes`` to ``peer``, which iterates over ``incoming``. Must be closed."""

    def __init__(self, transport: Transport, nbytes: int, peer: int, tag: int, what: str) -> None:
        self._transport = transport
        self._left = nbytes
        self._peer, self._tag = peer, tag
        self._what = f"{what}, sending to {transport.name(peer)}"
        self._sent: deque[Handle] = deque()
        self._piece = self._new_piece()
        self._filled = 0

    def write(self, data: memoryview) -> None:
        """Send the next bytes; they are copied, so that ``data`` may change afterwards."""
        while len(data):
            count = min(len(data), len(self._piece) - self._filled)
            if not count:
                raise ValueError(f"{self._what}: more bytes than were announced")
            self._piece[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == len(self._piece):
                self._send()

    def close(self) -> None:
        """Return once the peer has everything."""
        if self._left:
            missing = self._left - self._filled
            raise ValueError(f"{self._what}: {missing} bytes fewer than were announced")
        while self._sent:
            self._transport.wait(self._sent.popleft(), lambda: self._what)

    def _new_piece(self) -> np.ndarray:
        return np.empty(min(PIECE_BYTES, self._left), np.uint8)

    def _send(self) -> None:
        self._sent.append(self._transport.send(self._piece, self._peer, self._tag))
        self._left -= len(self._piece)
        if len(self._sent) > 1:
            self._transport.wait(self._sent.popleft(), lambda: self._what)
        self._piece, self._filled = self._new_piece(), 0


def incoming(
    transport: Transport, nbytes: int, peer: int, tag: int, what: str
) -> Iterator[memoryview]:
    """Yield the bytes of an ``Outgoing`` of ``peer`` in pieces, each good until the next."""

    def receive(left: int) -> tuple[np.ndarray, Handle]:
        piece = np.empty(min(PIECE_BYTES, left), np.uint8)
        return piece, transport.receive(piece, peer, tag)

    left = nbytes
    due = receive(left) if left else None
    while due is not None:
        piece, handle = due
        left -= len(piece)
        due = receive(left) if left else None
        transport.wait(handle, lambda: f"{what}, waiting for {transport.name(peer)}")
        yield buffer_of(piece)
