"""Give every rank its part of the checkpoint to go on from, whatever the layout.

Files may lie on several disks, and a rank may see none of them. A rank with a sound copy sends its
tensors, one by one, to ranks that need them and see no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from shardmlx.checkpoint.export import DTYPES, pieces_in
from shardmlx.checkpoint.resume import SoundCheckpoint
from shardmlx.distributed.byte_stream import Incoming, Outgoing
from shardmlx.distributed.messages import buffer_of, new_buffer
from shardmlx.distributed.tags import OBJECT_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.modelfiles.safetensors_header import Header, PlacedTensor, read_bytes, read_header
from shardmlx.models.runtime.slice import Piece


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """The tensors that a rank takes from the files of a ``kind``, those that are ``wanted``: of
    weights in ``own``, and of tensors that are named after them, these pieces, whatever pieces the
    files have."""

    kind: str
    wanted: Callable[[str], bool]
    own: Mapping[str, Piece] = field(default_factory=dict)


Lacking = Mapping[str, Collection[str]]
"""The names of tensors, by their file, that a rank takes and sees no copy of."""


class CheckpointReader:
    """The tensors of a sound checkpoint, as one rank reads them.

    Rank 0 lets all ranks tell the ``headers`` of the files that they send, open the checkpoint with
    all of these, tell what they lack, and read.
    """

    def __init__(self, transport: Transport, found: SoundCheckpoint) -> None:
        self._transport = transport
        self._found = found
        self._directory = found.store.path(found.manifest.step)
        self._headers: dict[str, Header] = {}
        self._pieces: dict[str, dict[str, Piece]] = {}

    def headers(self) -> dict[str, Header]:
        """Return the headers of the files that this rank sends to those that do not see them."""
        return {
            file.name: read_header(self._directory / file.name)
            for file in self._found.manifest.files
            if self._source(file.name) == self._transport.rank
        }

    def open(self, headers: Sequence[Mapping[str, Header]]) -> None:
        """Take the headers of all files, which the ranks have told."""
        for theirs in headers:
            self._headers |= theirs
        self._pieces = {file: pieces_in(each.metadata) for file, each in self._headers.items()}

    def names(self, kind: str) -> list[str]:
        """Return the names of all tensors in the files of a kind: ``weights``, for one."""
        return [name for _, header in self._of(kind) for name in header.tensors]

    def lacking(self, reading: TensorRequest) -> dict[str, set[str]]:
        """Return what this rank takes and sees no copy of."""
        return {
            file: self._taken(reading, file, header)
            for file, header in self._of(reading.kind)
            if not self._sees(file)
        }

    def read(
        self, reading: TensorRequest, lacking: Sequence[Lacking]
    ) -> Iterator[tuple[str, mx.array]]:
        """Yield this rank's tensors. It sends others what they lack, ``lacking[rank]``: all ranks
        exhaust it at a time."""
        begun: dict[str, mx.array] = {}
        for file, name, array in self._stored(reading, lacking):
            both = self._both_pieces(reading, file, name)
            if both is None:
                yield name, array
                continue
            theirs, mine = both
            begun[name] = theirs.put(array, mine, begun.get(name))
            mx.eval(begun[name])
        yield from begun.items()

    def _of(self, kind: str) -> list[tuple[str, Header]]:
        """Return the files of a kind with their headers, in the order in which ranks read them."""
        return sorted(
            (file, each) for file, each in self._headers.items() if file.startswith(f"{kind}-")
        )

    def _sees(self, file: str) -> bool:
        return self._found.seen_by.of(self._transport.rank) in self._found.disks[file]

    def _both_pieces(
        self, reading: TensorRequest, file: str, name: str
    ) -> tuple[Piece, Piece] | None:
        """Return the pieces that a file and this rank have; None if both have all."""
        theirs = _piece(name, self._pieces[file])
        mine = _piece(name, reading.own)
        some = theirs or mine
        return some and (theirs or some.everything, mine or some.everything)

    def _taken(self, reading: TensorRequest, file: str, header: Header) -> set[str]:
        """Return the names of a file's tensors that this rank takes."""
        taken = set()
        for name in filter(reading.wanted, header.tensors):
            both = self._both_pieces(reading, file, name)
            if both is None or both[0].meets(both[1]):
                taken.add(name)
        return taken

    def _stored(
        self, reading: TensorRequest, lacking: Sequence[Lacking]
    ) -> Iterator[tuple[str, str, mx.array]]:
        """Yield (file, name, tensor) of those that this rank takes."""
        read = partial(read_bytes, self._directory)
        for file, header in self._of(reading.kind):
            taken = self._taken(reading, file, header)
            sees_it = self._sees(file)
            for name, tensor in header.tensors.items():
                peers = [rank for rank, names in enumerate(lacking) if name in names.get(file, ())]
                if self._transport.rank == self._source(file):
                    for peer in peers:
                        self._send(name, tensor, peer)
                if name in taken:
                    pieces = tensor.pieces(read) if sees_it else self._received(name, tensor, file)
                    yield file, name, _filled(tensor, pieces)

    def _send(self, name: str, tensor: PlacedTensor, peer: int) -> None:
        what = f"reading {name}"
        stream = Outgoing(self._transport, tensor.nbytes, peer, OBJECT_TAG, what)
        for piece in tensor.pieces(partial(read_bytes, self._directory)):
            stream.write(piece)
        stream.close()

    def _received(self, name: str, tensor: PlacedTensor, file: str) -> Incoming:
        source = self._source(file)
        what = f"reading {name}"
        return Incoming(self._transport, tensor.nbytes, source, OBJECT_TAG, what)

    def _source(self, file: str) -> int:
        """Return the rank that sends a file to the ranks that do not see it."""
        return self._found.seen_by.groups[self._found.disks[file][0]][0]


def _piece(name: str, pieces: Mapping[str, Piece]) -> Piece | None:
    """Return the piece of a weight, or of what is named after it, if ``pieces`` have one."""
    return pieces.get(name) or pieces.get(name.rpartition(".")[0])


def _filled(tensor: PlacedTensor, pieces: Iterable[bytes | memoryview]) -> mx.array:
    array = new_buffer(tensor.shape, DTYPES[tensor.dtype])
    buffer = buffer_of(array)
    start = 0
    for piece in pieces:
        buffer[start : start + len(piece)] = piece
        start += len(piece)
    return array
