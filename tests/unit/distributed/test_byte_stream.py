"""Streams of bytes between two ranks: all of them, in order, a few pieces at a time."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardmlx.distributed import byte_stream
from shardmlx.distributed.byte_stream import Incoming, Outgoing
from tests.helpers.local_transport import LocalNetwork, LocalTransport

PIECE = 16
TAG = 1


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_stream, "PIECE_BYTES", PIECE)


def data_of(nbytes: int) -> bytes:
    return np.random.RandomState(nbytes).bytes(nbytes)


def stream(data: bytes, written: Sequence[int]) -> list[bytes]:
    """The pieces in which ``data`` arrives that is written in chunks of these sizes."""

    def work(transport: LocalTransport) -> list[bytes]:
        if transport.rank == 1:
            return [bytes(piece) for piece in Incoming(transport, len(data), 0, TAG, "loading")]
        out = Outgoing(transport, len(data), 1, TAG, "saving")
        start = 0
        for size in written:
            chunk = bytearray(data[start : start + size])
            out.write(memoryview(chunk))
            chunk[:] = bytes(size)  # what was written may change
            start += size
        out.close()
        return []

    pieces: list[bytes] = LocalNetwork(2, timeout=10).run(work)[1]
    return pieces


@pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("chunk", [1, 5, PIECE, 2 * PIECE + 3, 1000])
def test_what_is_written_arrives_in_pieces(nbytes: int, chunk: int) -> None:
    data = data_of(nbytes)
    written = [min(chunk, nbytes - start) for start in range(0, nbytes, chunk)]
    pieces = stream(data, written)
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [
        min(PIECE, nbytes - start) for start in range(0, nbytes, PIECE)
    ]


def test_no_side_holds_more_than_three_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, list[Any]] = defaultdict(list)
    most: dict[str, int] = defaultdict(int)

    def empty(size: int, dtype: Any) -> np.ndarray:
        array = np.empty(size, dtype)
        me = threading.current_thread().name
        held[me].append(weakref.ref(array))
        most[me] = max(most[me], sum(each() is not None for each in held[me]))
        return array

    monkeypatch.setattr(
        byte_stream, "np", SimpleNamespace(empty=empty, frombuffer=np.frombuffer, uint8=np.uint8)
    )
    assert b"".join(stream(data_of(50 * PIECE), [50 * PIECE])) == data_of(50 * PIECE)
    assert set(most) == {"rank-0", "rank-1"}
    assert max(most.values()) <= 3


@pytest.mark.parametrize("nbytes", [0, 5, PIECE, 2 * PIECE + 1])
def test_more_bytes_than_announced_are_refused(nbytes: int) -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 1:
            list(Incoming(transport, nbytes, 0, TAG, "loading"))
            return
        out = Outgoing(transport, nbytes, 1, TAG, "saving x")
        out.write(memoryview(bytes(nbytes)))
        with pytest.raises(
            ValueError,
            match=r"^saving x, sending to rank 1 on localhost: more bytes than were announced$",
        ):
            out.write(memoryview(b"1"))
        out.close()

    LocalNetwork(2, timeout=10).run(work)


@pytest.mark.parametrize(("nbytes", "written"), [(1, 0), (PIECE, 3), (3 * PIECE, 2 * PIECE + 1)])
def test_fewer_bytes_than_announced_are_refused(nbytes: int, written: int) -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 1:
            pieces = iter(Incoming(transport, nbytes, 0, TAG, "loading"))
            for _ in range(written // PIECE):
                next(pieces)
            return
        out = Outgoing(transport, nbytes, 1, TAG, "saving x")
        out.write(memoryview(bytes(written)))
        with pytest.raises(ValueError, match=f": {nbytes - written} bytes fewer than were announc"):
            out.close()

    LocalNetwork(2, timeout=10).run(work)


def test_who_waits_for_a_piece_says_for_whom() -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 1:
            next(iter(Incoming(transport, 1, 0, TAG, "reading weights")))

    with pytest.raises(
        RuntimeError, match=r"^reading weights, waiting for rank 0 on localhost: nothing came"
    ):
        LocalNetwork(2, timeout=0.05).run(work)


def test_bytes_that_change_on_their_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Outgoing._send

    def spoiling(out: Outgoing, piece: np.ndarray) -> None:
        send(out, piece ^ np.uint8(1) if len(piece) == 5 else piece)

    monkeypatch.setattr(Outgoing, "_send", spoiling)
    assert b"".join(stream(data_of(PIECE), [PIECE])) == data_of(PIECE)
    with pytest.raises(RuntimeError, match=r"^loading: .* damaged from rank 0 on localhost$"):
        stream(data_of(PIECE + 5), [PIECE + 5])
