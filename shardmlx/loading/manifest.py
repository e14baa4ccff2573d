"""Name a model, and plan which rank sends a machine its missing tensors.

A copy of a model begins as its small files and the heads of its weight files; missing tensors are
holes in these. No MLX, no MPI.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.common.digests import canonical_json
from shardmlx.modelfiles.parts import EMBEDDING, HEAD, place_of
from shardmlx.modelfiles.safetensors_header import INDEX_FILE, Header, PlacedTensor, read_header
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, CONFIG_FILE
from shardmlx.modelfiles.tensors import OTHER_SENSES, QUANTISED_PARTS, is_dropped
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import TensorShares

TEXTS = (
    CONFIG_FILE,
    INDEX_FILE,
    ADAPTER_CONFIG_FILE,
    "generation_config.json",
    "hf_quant_config.json",
)
"""Small files that a model is built from; only rank 0 needs those of the tokenizer."""

SAMPLE_BYTES = 512
"""Bytes compared at both ends of tensors: bfloat16 training leaves many numbers unchanged."""


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """The beginning of a copy: small files, and the header of each weight file. ``key`` differs for
    other weights."""

    key: str
    texts: Mapping[str, bytes]
    headers: Mapping[str, Header]

    def tensors(self) -> dict[str, PlacedTensor]:
        """Return all tensors by their names."""
        return {name: each for of in self.headers.values() for name, each in of.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors().values())


def fingerprint(directory: Path, files: Sequence[str]) -> str:
    """Return a digest of config.json, headers, and both ends of every tensor: not all is read."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE):
        if (directory / name).is_file():
            text = (directory / name).read_bytes()
            with suppress(ValueError):
                text = canonical_json(json.loads(text))
            digest.update(text)
    for file in sorted(files):
        header = read_header(directory / file)
        with (directory / file).open("rb", buffering=0) as content:
            digest.update(f"{file} {header.file_size} ".encode() + header.head)
            for tensor in header.tensors.values():
                content.seek(tensor.start)
                digest.update(content.read(min(SAMPLE_BYTES, tensor.nbytes)))
                content.seek(max(tensor.start, tensor.end - SAMPLE_BYTES))
                digest.update(content.read(min(SAMPLE_BYTES, tensor.nbytes)))
    return digest.hexdigest()


def read_model_manifest(directory: Path, files: Sequence[str], identity: str) -> ModelManifest:
    """Return the manifest of a directory; its key also changes when a file is rewritten."""
    digest = hashlib.sha256(identity.encode())
    headers = {file: read_header(directory / file) for file in sorted(files)}
    for file in headers:
        digest.update(f" {(directory / file).stat().st_mtime_ns}".encode())
    texts = {
        name: (directory / name).read_bytes() for name in TEXTS if (directory / name).is_file()
    }
    return ModelManifest(digest.hexdigest(), texts, headers)


def is_needed(name: str, shape: ModelShape, start: int, stop: int) -> bool:
    """Return whether layers ``start`` to ``stop`` read a tensor, or scales that go into theirs."""
    if OTHER_SENSES.search(name):
        return False
    part = place_of(name, shape)
    is_last = stop == shape.num_layers
    if isinstance(part, int):
        return start <= part < stop
    if part == EMBEDDING:
        return start == 0 or (is_last and shape.tied)
    if part == HEAD:
        return is_last and not is_dropped(name, shape)
    return True


def parts_of_shares(
    tensors: Mapping[str, PlacedTensor], shape: ModelShape, shares: TensorShares, *, scattered: bool
) -> list[dict[str, tuple[str, PlacedTensor]]]:
    """Return, for each rank of a group, the tensors of which it reads a part alone: their names and
    places, also ``scattered`` ones. Others have two parts, or another form when they are loaded."""
    found: list[dict[str, tuple[str, PlacedTensor]]] = [{} for _ in shares.weights]
    if shares.size == 1:
        return found
    for rank, mine in enumerate(found):
        cuts = [shares.cuts(kind, rank) for kind in shape.kinds]
        for name, tensor in tensors.items():
            layer = place_of(name, shape)
            (path, _, leaf) = name.rpartition(".")
            if not isinstance(layer, int) or leaf not in ("weight", "bias", *QUANTISED_PARTS):
                continue
            if not shape.is_declared and name not in shape.unchanged:
                continue
            own = path.removeprefix(f"{shape.names.layers}{layer}.")
            cut = cuts[shape.pattern[layer]].get(own)
            if cut is None or len(cut.ranges) > 1 or (cut.of == "inputs" and leaf == "bias"):
                continue
            axis = cut.axis(len(tensor.shape), leaf)
            size = (*tensor.shape, 0)[axis]
            # Columns of weights in few bits are packed.
            if size and cut.whole % size == 0 and (cut.of == "inputs" or size == cut.whole):
                first, last = cut.scaled(size)[0]
                place = _part(tensor, axis, first, last)
                if scattered or place.run == place.stride:
                    mine[name] = f"{name}[{':, ' * axis}{first}:{last}]", place
    return found


def _part(tensor: PlacedTensor, axis: int, first: int, last: int) -> PlacedTensor:
    """Return the place of a range of a tensor along an axis."""
    outer = math.prod(tensor.shape[:axis])
    stride = tensor.nbytes // outer
    one = stride // tensor.shape[axis]
    start = tensor.start + first * one
    run = (last - first) * one
    end = start + (outer - 1) * stride + run
    if outer == 1:  # it lies in one piece
        run = stride = 1
    return replace(tensor, start=start, end=end, run=run, stride=stride)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor to send: from the first rank of ``chain`` to the next, which passes it on."""

    name: str
    chain: tuple[int, ...]


def plan_transfers(
    tensors: Mapping[str, PlacedTensor],
    whole: Collection[int],
    present: Mapping[int, Collection[str]],
    missing: Mapping[int, Collection[str]],
) -> list[Transfer]:
    """Return the transfers, in an order in which no two ranks wait for each other. ``whole`` are
    the ranks with the whole model. All that miss a tensor form one chain, so that none sends it
    twice; it begins at the rank that has sent the least so far."""
    wanting: dict[str, list[int]] = {}
    for rank in sorted(missing):
        for name in missing[rank]:
            wanting.setdefault(name, []).append(rank)
    # Tensors with the same missing ranks and the same sources come from one of these sources.
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name in sorted(wanting, key=lambda n: (wanting[n], tensors[n].file, tensors[n].start)):
        sources = {*whole, *(rank for rank, there in present.items() if name in there)}
        groups.setdefault((tuple(wanting[name]), tuple(sorted(sources))), []).append(name)
    sent = dict.fromkeys((*whole, *present), 0)
    transfers = []
    for (chain, of), names in groups.items():
        source = min(of, key=lambda rank: (sent[rank], rank))
        sent[source] += sum(tensors[name].nbytes for name in names)
        transfers += [Transfer(name, (source, *chain)) for name in names]
    return transfers
