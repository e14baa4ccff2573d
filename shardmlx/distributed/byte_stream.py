"""Send long runs of bytes from rank to rank in pieces: neither side holds more than three.

A digest follows the bytes, by which the receiving rank finds damage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardmlx.common.digests import DIGEST_BYTES, new_digest
from shardmlx.distributed.messages import Handle, buffer_of
from shardmlx.distributed.transport import Outbox, Transport

PIECE_BYTES = 16 << 20


class Outgoing:
    """A stream of ``nbytes`` to ``peer``, which iterates over ``Incoming``. Must be closed.

    ``relayed`` is the stream that the bytes come from, with its digest.
    """

    def __init__(
        self,
        transport: Transport,
        nbytes: int,
        peer: int,
        tag: int,
        what: str,
        relayed: Incoming | None = None,
    ) -> None:
        self._left = nbytes
        self._peer = peer
        self._tag = tag
        self._what = what
        self._to = transport.name(peer)
        self._outbox = Outbox(transport)
        self._piece = self._new_piece()
        self._filled = 0
        self._digest = new_digest()
        self._relayed = relayed

    def write(self, data: bytes | memoryview) -> None:
        """Send the next bytes; they are copied, so that ``data`` may change afterwards."""
        data = memoryview(data)
        while len(data):
            count = min(len(data), len(self._piece) - self._filled)
            if not count:
                raise ValueError(
                    f"{self._what}, sending to {self._to}: more bytes than were announced"
                )
            self._piece[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == len(self._piece):
                if self._relayed is None:
                    self._digest.update(buffer_of(self._piece))
                self._send(self._piece)
                self._left -= len(self._piece)
                self._piece = self._new_piece()
                self._filled = 0

    def close(self) -> None:
        """Return once the peer has everything."""
        if self._left:
            missing = self._left - self._filled
            raise ValueError(
                f"{self._what}, sending to {self._to}: {missing} bytes fewer than were announced"
            )
        digest = self._digest.digest() if self._relayed is None else self._relayed.digest
        self._send(np.frombuffer(digest, np.uint8))
        self._outbox.drain(0)

    def _new_piece(self) -> np.ndarray:
        return np.empty(min(PIECE_BYTES, self._left), np.uint8)

    def _send(self, piece: np.ndarray) -> None:
        self._outbox.send(piece, self._peer, self._tag, self._what)
        self._outbox.drain(1)


class Incoming:
    """The ``nbytes`` of an ``Outgoing`` of ``peer``, in pieces, each good until the next.

    Raises ``RuntimeError`` after the last piece if the bytes have changed on their way; otherwise
    ``digest`` is then theirs.
    """

    def __init__(self, transport: Transport, nbytes: int, peer: int, tag: int, what: str) -> None:
        self._transport = transport
        self._left = nbytes
        self._peer = peer
        self._tag = tag
        self._what = what
        self.digest = b""

    def __iter__(self) -> Iterator[memoryview]:
        digest = new_digest()
        due = self._receive()
        while self._left:
            piece, handle = due
            self._left -= len(piece)
            due = self._receive()
            self._wait(handle)
            digest.update(buffer_of(piece))
            yield buffer_of(piece)
        expected, handle = due
        self._wait(handle)
        self.digest = digest.digest()
        if bytes(expected) != self.digest:
            raise RuntimeError(
                f"{self._what}: it came damaged from {self._transport.name(self._peer)}"
            )

    def _receive(self) -> tuple[np.ndarray, Handle]:
        """Post the receive of the next piece, or of the digest after the last one."""
        piece = np.empty(min(PIECE_BYTES, self._left) or DIGEST_BYTES, np.uint8)
        return piece, self._transport.receive(piece, self._peer, self._tag)

    def _wait(self, handle: Handle) -> None:
        what = f"{self._what}, waiting for {self._transport.name(self._peer)}"
        self._transport.wait(handle, lambda: what)
