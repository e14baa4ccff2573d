"""Write trained weights: adapters in one file, a whole model shard by shard.

Rank 0 writes; the others send it their tensors, one after the other, so that no rank holds more
than one at a time. Files appear under their final names only once they are complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from shardmlx.common.durable_files import (
    PARTIAL,
    NewFiles,
    flush_directory,
    pieces_of,
    why_not_written,
)
from shardmlx.distributed.messages import Handle, buffer_of, new_buffer
from shardmlx.distributed.tags import OBJECT_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.modelfiles.safetensors_header import INDEX_FILE, header_of
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE
from shardmlx.models.runtime.slice import Piece
from shardmlx.models.sizes.config_reader import parse_config
from shardmlx.pipeline.plan import Plan

COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of a model directory's configuration and tokenizer files."""

DTYPES: Mapping[str, mx.Dtype] = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "BOOL": mx.bool_,
    "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8,
    "I64": mx.int64, "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
}  # fmt: skip

_PIECES = "pieces"

SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """The name, shape and safetensors type of a tensor, known before its bytes come."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * DTYPES[self.dtype].size

    def in_whole(self, pieces: Mapping[str, Piece]) -> TensorSpec:
        """Return the tensor's spec, of which this may be a piece."""
        if (piece := pieces.get(self.name)) is None:
            return self
        shape = list(self.shape)
        shape[piece.axis] = piece.whole
        return self._replace(shape=tuple(shape))


def specs_of(arrays: Mapping[str, mx.array]) -> list[TensorSpec]:
    """Return the descriptions of arrays, in their order."""
    return [
        TensorSpec(name, tuple(array.shape), SAFETENSORS_NAMES[array.dtype])
        for name, array in arrays.items()
    ]


class SaveError(RuntimeError):
    """Weights or a checkpoint could not be written; the message names rank, host, file, reason."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The tensors that a rank has for a file, and the pieces that some of them are."""

    specs: Sequence[TensorSpec]
    pieces: Mapping[str, Piece]


@dataclass(frozen=True, slots=True)
class Collection:
    """The tensors that rank 0 collects of all ranks, each once.

    ``sources`` are the ranks that have some, each with its tensors, in the order in which rank 0
    takes them. ``pieces`` are the ranks that each have a piece of a tensor, by its name.
    """

    sources: Sequence[tuple[int, Sequence[TensorSpec]]]
    pieces: Mapping[str, Sequence[tuple[int, TensorSpec, Piece]]]

    @classmethod
    def of(cls, held: Sequence[HeldWeights]) -> Collection:
        """Return what there is to collect, where rank r has ``held[r]``."""
        sources: list[tuple[int, list[TensorSpec]]] = []
        pieces: dict[str, list[tuple[int, TensorSpec, Piece]]] = {}
        seen: set[str] = set()
        for rank, own in enumerate(held):
            for spec in own.specs:
                if spec.name in own.pieces:
                    part = rank, spec, own.pieces[spec.name]
                    pieces.setdefault(spec.name, []).append(part)
            new = [spec.in_whole(own.pieces) for spec in own.specs if spec.name not in seen]
            seen.update(spec.name for spec in new)
            if new:
                sources.append((rank, new))
        return cls(sources, pieces)

    def sent_by(self, rank: int) -> list[str]:
        """Return the names of what a rank sends to rank 0, in order."""
        names = []
        for owner, specs in self.sources:
            for spec in specs:
                senders = [member for member, _, _ in self.pieces.get(spec.name, ())] or [owner]
                if rank in senders:
                    names.append(spec.name)
        return names


class Holder(Protocol):
    """Tensors of a rank by name, such as those of a slice, of which some are pieces."""

    @property
    def trainable(self) -> Sequence[str]: ...
    @property
    def pieces(self) -> Mapping[str, Piece]: ...

    def parameters(self) -> Mapping[str, mx.array]:
        """Return all tensors."""

    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> mx.array: ...
    def __setitem__(self, name: str, array: mx.array) -> None: ...


class Collector:
    """The tensors of one rank's slices, which rank 0 collects: of one replica, or of all replicas
    where each ``holds`` a part. One tensor at a time travels."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        parts: Sequence[Holder],
        holds: Callable[[str], bool] | None = None,
    ) -> None:
        self._transport = transport
        replica, _ = plan.mesh.coordinates(transport.rank)
        self._holds = holds or (lambda name: replica == 0)
        self._keeps = holds or (lambda name: True)
        self._parts = parts
        self.name = transport.name(transport.rank)

    def held(self, *, trained_only: bool) -> HeldWeights:
        """Return what this rank has: all that it trains, or all of its slices."""
        arrays: dict[str, mx.array] = {}
        pieces: dict[str, Piece] = {}
        for part in self._parts:
            names = part.trainable if trained_only else part.parameters()
            arrays |= {name: part[name] for name in names if self._holds(name)}
            pieces |= part.pieces
        return HeldWeights(
            specs_of(arrays), {name: piece for name, piece in pieces.items() if name in arrays}
        )

    def send(self, names: Sequence[str]) -> None:
        """Send these tensors to rank 0, which receives them."""
        for name in names:
            handle = self._transport.send(self._own(name), 0, OBJECT_TAG)
            self._wait(handle, f"saving {name}, sending to", 0)

    def receive(self, collection: Collection, rank: int) -> Iterator[tuple[str, mx.array]]:
        """Yield, on rank 0, the tensors of the collection that ``rank`` is the source of. Rank 0
        must take those of all sources, in their order."""
        for spec in dict(collection.sources)[rank]:
            what = f"saving {spec.name}"
            if spec.name not in collection.pieces:
                yield spec.name, self._received(rank, spec, what)
                continue
            whole = mx.zeros(spec.shape, DTYPES[spec.dtype])
            for member, own, piece in collection.pieces[spec.name]:
                piece.put(self._received(member, own, what), piece.everything, whole)
            mx.eval(whole)
            yield spec.name, whole

    def wanted(self) -> set[str]:
        """Return the names of the trained tensors that this rank keeps."""
        return {name for part in self._parts for name in part.trainable if self._keeps(name)}

    def give(self, tensors: Mapping[str, mx.array], wanted: Sequence[Set[str]]) -> None:
        """Set this rank's trained tensors to those given, and send the others theirs, of which rank
        r has ``wanted[r]``: on rank 0, one tensor at a time."""
        for name in sorted({*chain.from_iterable(wanted)}):
            array = mx.contiguous(tensors[name])
            mx.eval(array)
            for peer, theirs in enumerate(wanted):
                if peer != self._transport.rank and name in theirs:
                    handle = self._transport.send(array, peer, OBJECT_TAG)
                    self._wait(handle, f"handing out {name}, sending to", peer)
            if name in wanted[self._transport.rank]:
                self._set(name, array)

    def take(self, specs: Sequence[TensorSpec]) -> None:
        """Set trained tensors to those of these that rank 0 sends: those that this rank keeps."""
        mine = self.wanted()
        for spec in specs:
            if spec.name in mine:
                self._set(spec.name, self._received(0, spec, f"handing out {spec.name}"))

    def _set(self, name: str, whole: mx.array) -> None:
        for part in self._parts:
            if name in part:
                piece = part.pieces.get(name)
                part[name] = whole if piece is None else piece.everything.put(whole, piece)
                mx.eval(part[name])

    def _received(self, rank: int, spec: TensorSpec, what: str) -> mx.array:
        if rank == self._transport.rank:
            return self._own(spec.name)
        array = new_buffer(spec.shape, DTYPES[spec.dtype])
        handle = self._transport.receive(array, rank, OBJECT_TAG)
        self._wait(handle, f"{what}, waiting for", rank)
        return array

    def _own(self, name: str) -> mx.array:
        array = mx.contiguous(next(part[name] for part in self._parts if name in part))
        mx.eval(array)
        return array

    def _wait(self, handle: Handle, what: str, peer: int) -> None:
        transport = self._transport
        transport.wait(handle, lambda: f"rank {transport.rank}, {what} {transport.name(peer)}")


def save_adapters(
    collector: Collector,
    collection: Collection,
    directory: Path,
    config: Mapping[str, Any],
    copy_as: str | None,
) -> None:
    """Write the trained weights, and ``config``, as ``mlx_lm`` does; ``copy_as`` names a copy. On
    rank 0, while the others ``send``. Raises ``SaveError``."""
    specs = [spec for _, of_rank in collection.sources for spec in of_rank]
    arrays = chain.from_iterable(
        collector.receive(collection, owner) for owner, _ in collection.sources
    )
    nbytes = sum(spec.nbytes for spec in specs)
    with _saving(collector, directory, nbytes) as files:
        files.write(ADAPTER_CONFIG_FILE, _json(config, 4))
        files.write(ADAPTER_FILE, safetensors_pieces(specs, arrays))
    if copy_as is not None:
        with _saving(collector, directory, nbytes) as files:
            files.write(copy_as, pieces_of(directory / ADAPTER_FILE))


def save_model(collector: Collector, collection: Collection, source: Path, directory: Path) -> None:
    """Write the fine-tuned model as a model directory, a shard for each pipeline rank.

    Configuration and tokenizer are those of ``source``, with the fields that mlx-lm reads. Shards
    that this function wrote there before are replaced once the new ones are complete; nothing else
    is touched. There is no config.json during the replacement, so that a mixture of two models
    cannot be loaded. On rank 0, while the others ``send``. Raises ``SaveError``.
    """
    sources = collection.sources
    index: dict[str, str] = {}
    total = sum(spec.nbytes for _, specs in sources for spec in specs)
    with _saving(collector, directory, total) as files:
        for number, (owner, specs) in enumerate(sources, 1):
            name = f"model-{number:05d}-of-{len(sources):05d}.safetensors"
            files.write(name, safetensors_pieces(specs, collector.receive(collection, owner)))
            index.update((spec.name, name) for spec in specs)
        for path in sorted(source.iterdir()):
            if path.suffix in COPIED_SUFFIXES and path.name not in (INDEX_FILE, CONFIG_FILE):
                files.write(path.name, pieces_of(path))
        files.write(
            INDEX_FILE, _json({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        )
        own = source / CONFIG_FILE
        # Last, since a directory with a config.json is a model.
        files.write(CONFIG_FILE, _json(parse_config(own.read_bytes(), own), indent=2))
        for name in (CONFIG_FILE, *(indexed_files(directory) - {*index.values()})):
            (directory / name).unlink(missing_ok=True)
        flush_directory(directory)


def indexed_files(directory: Path) -> set[str]:
    """Return the names of the files of weights that a directory's index lists; none without one
    that can be read."""
    try:
        return {*json.loads((directory / INDEX_FILE).read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


@contextmanager
def _saving(collector: Collector, directory: Path, nbytes: int) -> Iterator[NewFiles]:
    """Give out files that take their names after the block. If one fails, earlier files stay."""
    files = NewFiles(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield files
        files.publish()
    except OSError as error:
        what_stays = (
            "what was there before is unchanged"
            if files.discard()
            else f"new files that are not in their place yet are called {PARTIAL}..."
        )
        raise SaveError(
            f"{collector.name}, saving {files.at_work_on}: "
            f"{why_not_written(error, directory, nbytes)}, or name another --adapter-path; "
            f"{what_stays}"
        ) from error
    except BaseException:
        files.discard()
        raise


def _json(content: Mapping[str, Any], indent: int) -> list[bytes]:
    return [(json.dumps(content, indent=indent) + "\n").encode()]


def safetensors_header(
    specs: Sequence[TensorSpec], pieces: Mapping[str, Piece] | None = None
) -> bytes:
    """Return the bytes before the data of a safetensors file, whose tensors come in this order: of
    weights in ``pieces``, and of what is named after them, other files have the rest."""
    return header_of(specs, **({_PIECES: json.dumps(pieces)} if pieces else {}))


def pieces_in(metadata: Mapping[str, str]) -> dict[str, Piece]:
    """Return the ``pieces`` of a header's metadata."""
    return {name: Piece(*each) for name, each in json.loads(metadata.get(_PIECES, "{}")).items()}


def safetensors_pieces(
    specs: Sequence[TensorSpec], arrays: Iterable[tuple[str, mx.array]], **metadata: str
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file tensor by tensor, in the order of ``specs``."""
    yield header_of(specs, **metadata)
    for spec, (name, array) in zip(specs, arrays, strict=True):
        data = buffer_of(array)
        if name != spec.name or len(data) != spec.nbytes:
            raise ValueError(f"{name} has {len(data)} bytes, and {spec.name} {spec.nbytes}")
        yield data
