"""Send tensors along chains of ranks: each rank of a chain keeps the bytes, and passes them on.

A digest follows each tensor, so that the receiving rank finds damage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardmlx.common.digests import DIGEST_BYTES, new_digest
from shardmlx.distributed import byte_stream
from shardmlx.distributed.byte_stream import incoming
from shardmlx.distributed.messages import OBJECT_TAG, Handle
from shardmlx.distributed.transport import Transport
from shardmlx.loading.manifest import Transfer
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.modelfiles.model_files import PlacedTensor

Read = Callable[[str, int, int], bytes]
"""Function that returns so many bytes of a weight file from an offset on."""


def send_tensors(
    transport: Transport,
    transfers: Sequence[Transfer],
    tensors: Mapping[str, PlacedTensor],
    read: Read,
    copy: PartialCopy | None,
    advance: Callable[[int], None],
) -> int:
    """Play this rank's part in ``transfers``; return the bytes that it has received.

    All ranks must call it with the same transfers, in the same order. Received bytes are written to
    ``copy`` and reported to ``advance``. Raises ``RuntimeError`` for a damaged tensor.
    """
    received = 0
    for transfer in transfers:
        place = tensors[transfer.name]
        if transport.rank == transfer.chain[0]:
            _send(transport, transfer, place, read, advance)
        elif transport.rank in transfer.chain:
            if copy is None:
                raise ValueError(f"{transfer.name} is sent to a rank that keeps no copy")
            _relay(transport, transfer, place, copy, advance)
            received += place.nbytes
    return received


def _send(
    transport: Transport,
    transfer: Transfer,
    place: PlacedTensor,
    read: Read,
    advance: Callable[[int], None],
) -> None:
    outgoing = _Outgoing(transport, transfer)
    digest = new_digest()
    step = byte_stream.PIECE_BYTES
    for start in range(place.start, place.end, step):
        piece = read(place.file, start, min(step, place.end - start))
        outgoing.send(piece)
        digest.update(piece)
        advance(len(piece))
    outgoing.send(digest.digest())
    outgoing.close()


def _relay(
    transport: Transport,
    transfer: Transfer,
    place: PlacedTensor,
    copy: PartialCopy,
    advance: Callable[[int], None],
) -> None:
    """Write a tensor while it arrives, and pass it on."""
    what = _loading(transport, transfer)
    peer = transfer.chain[transfer.chain.index(transport.rank) - 1]
    outgoing = _Outgoing(transport, transfer)
    digest, offset = new_digest(), place.start
    for piece in incoming(transport, place.nbytes, peer, OBJECT_TAG, what):
        outgoing.send(piece)
        digest.update(piece)
        copy.write(place.file, offset, piece)
        offset += len(piece)
        advance(len(piece))
    (expected,) = incoming(transport, DIGEST_BYTES, peer, OBJECT_TAG, what)
    outgoing.send(expected)
    if expected != digest.digest():
        raise RuntimeError(f"{what}: it came damaged from {transport.name(peer)}")
    outgoing.close()
    copy.add(transfer.name, digest.digest())


def _loading(transport: Transport, transfer: Transfer) -> str:
    return f"{transport.name(transport.rank)}, loading {transfer.name}"


class _Outgoing:
    """Pieces to the next rank of a chain, two under way at most; none from the last rank.

    Unlike ``byte_stream.Outgoing`` it sends each piece as it is, without copying it.
    """

    def __init__(self, transport: Transport, transfer: Transfer) -> None:
        chain = transfer.chain
        after = chain.index(transport.rank) + 1
        self._peer = chain[after] if after < len(chain) else None
        self._transport = transport
        self._what = _loading(transport, transfer)
        self._sent: deque[Handle] = deque()

    def send(self, piece: bytes | memoryview) -> None:
        """Send a piece, which must not change until it has been sent."""
        if self._peer is None:
            return
        array = np.frombuffer(piece, np.uint8)
        self._sent.append(self._transport.send(array, self._peer, OBJECT_TAG))
        self._wait(most=2)

    def close(self) -> None:
        """Wait until the peer has everything."""
        self._wait(most=0)

    def _wait(self, most: int) -> None:
        while len(self._sent) > most:
            self._transport.wait(
                self._sent.popleft(),
                lambda: f"{self._what}, sending to {self._transport.name(self._peer or 0)}",
            )
