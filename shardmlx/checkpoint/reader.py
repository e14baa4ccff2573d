"""Find the checkpoint to go on from, and give every rank its part of it, whatever the layout.

Files may lie on several disks, and a rank may see none of them. A rank with a sound copy sends its
tensors, one by one, to ranks that need them and see no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import mlx.core as mx

from shardmlx.checkpoint.export import DTYPES, pieces_in
from shardmlx.checkpoint.store import Manifest, Store, name_of
from shardmlx.distributed.byte_stream import Incoming, Outgoing
from shardmlx.distributed.messages import OBJECT_TAG, buffer_of, new_buffer
from shardmlx.distributed.shared_disks import Disks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.modelfiles.safetensors_header import Header, PlacedTensor, read_bytes, read_header
from shardmlx.models.runtime.slice import Piece

NO_PIECES: Mapping[str, Piece] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SoundCheckpoint:
    """A sound checkpoint. ``disks[file]`` are the disks that have a sound copy of a file."""

    store: Store
    seen_by: Disks
    manifest: Manifest
    disks: Mapping[str, tuple[int, ...]]


def find_checkpoint(
    transport: Transport, store: Store, disks: Disks, step: int | None = None
) -> tuple[SoundCheckpoint | None, dict[int, str]]:
    """Find the newest sound checkpoint on any disk, or that of ``step``, and the faults, by step,
    of those that were passed over. Collective: the ranks that see a disk share the reading."""
    newest_first = _manifests(transport, store, disks)
    faults: dict[int, str] = {}
    for candidate in sorted(newest_first, reverse=True):
        if step is not None and candidate != step:
            continue
        # A step may exist in several versions: of a run that was set back, on a disk that was away
        # meanwhile. The version on most disks is the one that was completed last.
        versions = newest_first[candidate]
        manifests = [each for each in versions.values() if isinstance(each, Manifest)]
        problems = [each for each in versions.values() if isinstance(each, str)]
        distinct = [each for i, each in enumerate(manifests) if each not in manifests[:i]]
        for manifest in sorted(distinct, key=manifests.count, reverse=True):
            holders = [disk for disk, each in versions.items() if each == manifest]
            sound, wrong = _check(transport, store, disks, manifest, holders)
            if not wrong:
                return SoundCheckpoint(store, disks, manifest, sound), faults
            problems += wrong
        faults[candidate] = problems[0]
    return None, faults


def _manifests(
    transport: Transport, store: Store, disks: Disks
) -> dict[int, dict[int, Manifest | str]]:
    """Return the manifest of each checkpoint, or its fault, by step and disk."""
    what = "looking for checkpoints"
    mine: dict[int, Manifest | str] = {}
    if disks.leads(transport.rank):
        for step in store.steps():
            try:
                mine[step] = store.manifest(step)
            except UserError as error:
                mine[step] = str(error)
    found: dict[int, dict[int, Manifest | str]] = {}
    for rank, theirs in enumerate(transport.all_gather(mine, what)):
        for step, manifest in theirs.items():
            found.setdefault(step, {})[disks.of(rank)] = manifest
    return found


def _check(
    transport: Transport, store: Store, disks: Disks, manifest: Manifest, holders: Sequence[int]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the disks with a sound copy of each file, and the faults of files that have none."""
    mine: dict[str, str | None] = {}
    disk = disks.of(transport.rank)
    if disk in holders:
        group = disks.groups[disk]
        share = manifest.files[group.index(transport.rank) :: len(group)]
        mine = {file.name: store.fault(manifest.step, file) for file in share}
    everyone = transport.all_gather(mine, f"checking {name_of(manifest.step)}")
    sound: dict[str, list[int]] = {file.name: [] for file in manifest.files}
    faults: dict[str, list[str]] = {name: [] for name in sound}
    for rank, theirs in enumerate(everyone):
        for name, fault in theirs.items():
            if fault is None:
                sound[name].append(disks.of(rank))
            else:
                faults[name].append(f"{fault} ({transport.name(rank)})")
    # The damage of a copy says more than its absence from another disk.
    wrong = [
        min(faults[name], key=lambda text: " is missing (" in text)
        for name in sound
        if not sound[name]
    ]
    return {name: tuple(where) for name, where in sound.items()}, wrong


class CheckpointReader:
    """The tensors of a sound checkpoint. All methods are collective."""

    def __init__(self, transport: Transport, found: SoundCheckpoint) -> None:
        self._transport = transport
        self._found = found
        self._directory = found.store.path(found.manifest.step)
        mine = {
            file.name: read_header(self._directory / file.name)
            for file in found.manifest.files
            if self._source(file.name) == transport.rank
        }
        headers: dict[str, Header] = {}
        for theirs in transport.all_gather(mine, "reading the headers of the checkpoint"):
            headers |= theirs
        self._headers = dict(sorted(headers.items()))
        self._pieces = {file: pieces_in(header.metadata) for file, header in headers.items()}

    def names(self, kind: str) -> list[str]:
        """Return the names of all tensors in the files of a kind: ``weights``, for one."""
        return [name for header in self._of(kind).values() for name in header.tensors]

    def _of(self, kind: str) -> dict[str, Header]:
        return {file: each for file, each in self._headers.items() if file.startswith(f"{kind}-")}

    def read(
        self, kind: str, wanted: Callable[[str], bool], own: Mapping[str, Piece] = NO_PIECES
    ) -> Iterator[tuple[str, mx.array]]:
        """Yield this rank's tensors from the files of one kind: of weights in ``own``, and of what
        is named after them, these pieces, whatever pieces the files have. All ranks must exhaust
        it."""

        def pieces(file: str, name: str) -> tuple[Piece, Piece] | None:
            """Return the pieces that a file and this rank have; None if both have all."""
            theirs, mine = (_piece(name, each) for each in (self._pieces[file], own))
            some = theirs or mine
            return some and (theirs or some.everything, mine or some.everything)

        def takes(file: str, name: str) -> bool:
            both = pieces(file, name)
            return wanted(name) and (both is None or both[0].meets(both[1]))

        begun: dict[str, mx.array] = {}
        for file, name, array in self._stored(kind, takes):
            if (both := pieces(file, name)) is None:
                yield name, array
                continue
            theirs, mine = both
            begun[name] = theirs.put(array, mine, begun.get(name))
            mx.eval(begun[name])
        yield from begun.items()

    def _stored(
        self, kind: str, takes: Callable[[str, str], bool]
    ) -> Iterator[tuple[str, str, mx.array]]:
        """Yield (file, name, tensor) of those that this rank takes."""
        transport, rank = self._transport, self._transport.rank
        for file, header in self._of(kind).items():
            mine = [name for name in header.tensors if takes(file, name)]
            sees_it = self._found.seen_by.of(rank) in self._found.disks[file]
            lacking = transport.all_gather([] if sees_it else mine, f"reading {file}")
            read, source = partial(read_bytes, self._directory), self._source(file)
            for name, tensor in header.tensors.items():
                what, nbytes = f"reading {name}", tensor.nbytes
                for peer, needed in enumerate(lacking):
                    if name not in needed:
                        continue
                    if rank == source:
                        stream = Outgoing(transport, nbytes, peer, OBJECT_TAG, what)
                        for piece in tensor.pieces(read):
                            stream.write(piece)
                        stream.close()
                    elif rank == peer:
                        pieces = Incoming(transport, nbytes, source, OBJECT_TAG, what)
                        yield file, name, _filled(tensor, pieces)
                if sees_it and name in mine:
                    yield file, name, _filled(tensor, tensor.pieces(read))

    def _source(self, file: str) -> int:
        """Return the rank that sends a file to the ranks that do not see it."""
        return self._found.seen_by.groups[self._found.disks[file][0]][0]


def _piece(name: str, pieces: Mapping[str, Piece]) -> Piece | None:
    """Return the piece of a weight, or of what is named after it, if ``pieces`` have one."""
    return pieces.get(name) or pieces.get(name.rpartition(".")[0])


def _filled(tensor: PlacedTensor, pieces: Iterable[bytes | memoryview]) -> mx.array:
    array = new_buffer(tensor.shape, DTYPES[tensor.dtype])
    buffer, start = buffer_of(array), 0
    for piece in pieces:
        buffer[start : start + len(piece)] = piece
        start += len(piece)
    return array
