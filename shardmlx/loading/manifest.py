"""Name a model, and plan what a machine that lacks it must be given, and by which rank.

A copy of a model begins as its small files and the heads of its weight files; of the tensors it
has those that were brought, and holes in the place of the others. No MLX, no MPI.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmlx.common.digests import canonical_json
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import PlacedTensor
from shardmlx.modelfiles.parts import EMBEDDING, HEAD, place_of
from shardmlx.modelfiles.safetensors_header import (
    INDEX_FILE,
    LENGTH_BYTES,
    Header,
    find_tensors,
    parse_header,
    read_header,
)
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, CONFIG_FILE
from shardmlx.models.shape import ModelShape
from shardmlx.models.tensors import is_dropped

TEXTS = (
    CONFIG_FILE,
    INDEX_FILE,
    ADAPTER_CONFIG_FILE,
    "generation_config.json",
    "hf_quant_config.json",
)
"""The small files from which a model is built; those of the tokenizer are for rank 0 only."""

SAMPLE_BYTES = 512
"""Compared at both ends of every tensor: training in bfloat16 leaves many numbers as they are."""


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """The beginning of a copy: small files, and of each weight file its head and its size in bytes.

    ``key`` names the content: other weights have another one.
    """

    key: str
    texts: Mapping[str, bytes]
    heads: Mapping[str, bytes]
    sizes: Mapping[str, int]

    def headers(self) -> dict[str, Header]:
        """Return the header of each weight file."""
        return {
            file: parse_header(head[LENGTH_BYTES:], self.sizes[file], file)
            for file, head in self.heads.items()
        }

    def tensors(self) -> dict[str, PlacedTensor]:
        """Return the place of each tensor."""
        return place_tensors(self.headers())


def place_tensors(headers: Mapping[str, Header]) -> dict[str, PlacedTensor]:
    """Return the place of each tensor; raise ``UserError`` for one that two files have."""
    _, faults = find_tensors(headers, {}, "the model")
    if faults:
        raise UserError(faults[0])
    return {
        name: PlacedTensor(file, info.dtype, info.shape, *header.span(name))
        for file, header in headers.items()
        for name, info in header.tensors.items()
    }


def fingerprint(directory: Path, files: Sequence[str]) -> str:
    """Return a digest that names the model, or the adapters, in ``files`` of a directory.

    It is made of config.json, the headers, and both ends of every tensor: a large model is not read
    whole. Wherever the files lie, it is the same.
    """
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE):
        if (directory / name).is_file():
            digest.update(_canonical((directory / name).read_bytes()))
    for file in sorted(files):
        header = read_header(directory / file)
        with (directory / file).open("rb", buffering=0) as content:
            digest.update(f"{file} {header.file_size} ".encode())
            digest.update(content.read(header.data_offset))
            for name in header.tensors:
                start, end = header.span(name)
                content.seek(start)
                digest.update(content.read(min(SAMPLE_BYTES, end - start)))
                content.seek(max(start, end - SAMPLE_BYTES))
                digest.update(content.read(min(SAMPLE_BYTES, end - start)))
    return digest.hexdigest()


def read_model_manifest(directory: Path, files: Sequence[str], identity: str) -> ModelManifest:
    """Return the manifest of a directory with all its weight ``files``, whose fingerprint is
    ``identity``.

    The key changes too when a file is written again, so that what was kept of another content is
    not taken, even if that differs only in the middle of a tensor.
    """
    digest = hashlib.sha256(identity.encode())
    heads, sizes = {}, {}
    for file in sorted(files):
        header = read_header(directory / file)
        with (directory / file).open("rb") as content:
            heads[file] = content.read(header.data_offset)
        sizes[file] = header.file_size
        digest.update(f" {(directory / file).stat().st_mtime_ns}".encode())
    texts = {
        name: (directory / name).read_bytes() for name in TEXTS if (directory / name).is_file()
    }
    return ModelManifest(digest.hexdigest(), texts, heads, sizes)


def _canonical(text: bytes) -> bytes:
    """JSON without what is only its writing."""
    try:
        return canonical_json(json.loads(text))
    except ValueError:
        return text


def is_needed(name: str, shape: ModelShape, start: int, stop: int) -> bool:
    """Return whether the stage with layers ``start`` to ``stop`` reads the tensor ``name``.

    It also reads what mlx-lm drops of a layer after a look at it: scales that it multiplies in.
    """
    if shape.outer_family is not shape.family and shape.outer_family.drops(name):
        return False  # what sees or hears
    part = place_of(name, shape)
    is_last = stop == shape.num_layers
    if isinstance(part, int):
        return start <= part < stop
    if part == EMBEDDING:
        return start == 0 or (is_last and shape.tied)
    if part == HEAD:
        return is_last and not is_dropped(name, shape)
    return True


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor on its way: from the first rank of ``chain`` to the next, who passes it on."""

    name: str
    chain: tuple[int, ...]


def plan_transfers(
    tensors: Mapping[str, PlacedTensor],
    whole: Collection[int],
    present: Mapping[int, Collection[str]],
    missing: Mapping[int, Collection[str]],
) -> list[Transfer]:
    """Return who sends what, in an order in which no two ranks wait for each other.

    ``whole`` are the ranks with the whole model; of the others ``present`` and ``missing`` are the
    tensors that they have and still need. All ranks that miss a tensor form one chain, so that none
    sends it twice; it begins at the rank that has sent the least so far.
    """
    wanting: dict[str, list[int]] = {}
    for rank in sorted(missing):
        for name in missing[rank]:
            wanting.setdefault(name, []).append(rank)
    # All that the same ranks miss, and the same ranks have, comes from one of those.
    bundles: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name in sorted(wanting, key=lambda n: (wanting[n], tensors[n].file, tensors[n].start)):
        sources = {*whole, *(rank for rank, there in present.items() if name in there)}
        if not sources:
            raise ValueError(f"no rank has the tensor {name}")
        bundles.setdefault((tuple(wanting[name]), tuple(sorted(sources))), []).append(name)
    sent = dict.fromkeys((*whole, *present), 0)
    transfers = []
    for (chain, of), names in bundles.items():
        source = min(of, key=lambda rank: (sent[rank], rank))
        sent[source] += sum(tensors[name].nbytes for name in names)
        transfers += [Transfer(name, (source, *chain)) for name in names]
    return transfers
