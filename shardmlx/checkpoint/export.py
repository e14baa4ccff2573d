"""Write what was trained: adapters in one file, a whole model shard by shard.

Rank 0 writes; the others send it their tensors, one after the other, so that no memory holds
more than it must. Files appear under their final names only once they are complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import mlx.core as mx

from shardmlx.common.durable_files import flush_directory, replace_durably
from shardmlx.distributed.messages import OBJECT_TAG, buffer_of, new_buffer
from shardmlx.distributed.transport import Transport
from shardmlx.modelfiles.safetensors_header import INDEX_FILE
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE
from shardmlx.models.slice import Slice
from shardmlx.pipeline.plan import Plan

PARTIAL = "partial-"
"""Begins the names of files that are being written."""

COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of a model directory's configuration and tokenizer files."""

SAFETENSORS_NAMES: Mapping[mx.Dtype, str] = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint64: "U64",
    mx.uint32: "U32",
    mx.uint16: "U16",
    mx.uint8: "U8",
    mx.int64: "I64",
    mx.int32: "I32",
    mx.int16: "I16",
    mx.int8: "I8",
    mx.bool_: "BOOL",
}


class TensorSpec(NamedTuple):
    """The name, shape and type of a tensor, known before its bytes come."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        size = self.dtype.size
        for side in self.shape:
            size *= side
        return size


class Collector:
    """The tensors of one replica's slices, brought to rank 0. All methods are collective."""

    def __init__(self, plan: Plan, transport: Transport, parts: Sequence[Slice]) -> None:
        self._transport = transport
        replica, _ = plan.mesh.coordinates(transport.rank)
        self._parts = parts if replica == 0 else []
        self._sources = range(plan.mesh.pp)

    def specs(self, trained_only: bool) -> list[tuple[int, list[TensorSpec]]]:
        """Return (rank, its tensors) for each rank of the first replica, each tensor once."""
        mine: dict[str, TensorSpec] = {}
        for part in self._parts:
            for name in part.trainable if trained_only else part.parameters():
                array = part[name]
                mine[name] = TensorSpec(name, tuple(array.shape), array.dtype)
        seen: set[str] = set()
        result = []
        for rank, specs in enumerate(
            self._transport.all_gather([(s.name, s.shape, str(s.dtype)) for s in mine.values()])
        ):
            new = [
                TensorSpec(name, shape, getattr(mx, dtype.rpartition(".")[2]))
                for name, shape, dtype in specs
                if name not in seen
            ]
            seen.update(spec.name for spec in new)
            if rank in self._sources:
                result.append((rank, new))
        return result

    def tensors(self, rank: int, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, mx.array]]:
        """Yield, on rank 0, the tensors of ``rank`` one by one; nothing elsewhere.

        All ranks must exhaust it, in the same order.
        """
        for spec in specs:
            if rank == self._transport.rank:
                array = mx.contiguous(self._own(spec.name))
                mx.eval(array)
                if rank != 0:
                    handle = self._transport.send(array, 0, OBJECT_TAG)
                    self._transport.wait(handle, lambda s=spec: self._what(s, 0, "sending to"))  # type: ignore[misc]
            elif self._transport.rank == 0:
                array = new_buffer(spec.shape, spec.dtype)
                handle = self._transport.receive(array, rank, OBJECT_TAG)
                self._transport.wait(handle, lambda s=spec: self._what(s, rank, "waiting for"))  # type: ignore[misc]
            else:
                continue
            if self._transport.rank == 0:
                yield spec.name, array

    def _own(self, name: str) -> mx.array:
        return next(part[name] for part in self._parts if name in part)

    def _what(self, spec: TensorSpec, peer: int, how: str) -> str:
        return (
            f"rank {self._transport.rank}, saving {spec.name}, {how} {self._transport.name(peer)}"
        )


def save_adapters(collector: Collector, directory: Path, copy_as: str | None, rank: int) -> None:
    """Write the trained weights as ``mlx_lm`` does; ``copy_as`` names a second copy. Collective."""
    arrays: dict[str, mx.array] = {}
    for source, specs in collector.specs(trained_only=True):
        arrays.update(collector.tensors(source, specs))
    if rank == 0:
        target = directory / ADAPTER_FILE
        partial = directory / (PARTIAL + ADAPTER_FILE)
        mx.save_safetensors(str(partial), arrays)
        replace_durably(partial, target)
        if copy_as is not None:
            shutil.copyfile(target, directory / (PARTIAL + copy_as))
            replace_durably(directory / (PARTIAL + copy_as), directory / copy_as)


def write_adapter_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write what ``mlx_lm`` needs to load the adapters again."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / (PARTIAL + ADAPTER_CONFIG_FILE)
    partial.write_text(json.dumps(config, indent=4) + "\n")
    replace_durably(partial, directory / ADAPTER_CONFIG_FILE)


def save_model(collector: Collector, source: Path, directory: Path, rank: int) -> None:
    """Write the fine-tuned model as a model directory, a shard for each pipeline rank. Collective.

    Configuration and tokenizer are those of ``source``. The shards of a model that this function
    wrote there before are replaced, once the new ones are complete; nothing else is touched. While
    they are replaced there is no config.json: what is half of one model and half of another cannot
    be loaded.
    """
    sources = collector.specs(trained_only=False)
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, (owner, specs) in enumerate(sources, 1):
        name = f"model-{number:05d}-of-{len(sources):05d}.safetensors"
        tensors = collector.tensors(owner, specs)
        if rank != 0:
            for _ in tensors:
                pass
            continue
        with (directory / (PARTIAL + name)).open("wb") as file:
            write_safetensors(file, specs, (array for _, array in tensors))
        index.update((spec.name, name) for spec in specs)
    if rank != 0:
        return
    stale = _shards_of(directory) - set(index.values())
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    flush_directory(directory)
    for name in sorted(set(index.values())):
        replace_durably(directory / (PARTIAL + name), directory / name)
    for name in stale:
        (directory / name).unlink(missing_ok=True)
    for path in source.iterdir():
        if path.suffix in COPIED_SUFFIXES and path.name not in (INDEX_FILE, CONFIG_FILE):
            shutil.copyfile(path, directory / path.name)
    total = sum(spec.nbytes for _, specs in sources for spec in specs)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    partial = directory / (PARTIAL + INDEX_FILE)
    partial.write_text(json.dumps(content, indent=2) + "\n")
    replace_durably(partial, directory / INDEX_FILE)
    shutil.copyfile(source / CONFIG_FILE, directory / (PARTIAL + CONFIG_FILE))
    replace_durably(directory / (PARTIAL + CONFIG_FILE), directory / CONFIG_FILE)


def _shards_of(directory: Path) -> set[str]:
    """Return the shards that the index of a model directory names."""
    try:
        return set(json.loads((directory / INDEX_FILE).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError):
        return set()


def safetensors_header(specs: Sequence[TensorSpec]) -> bytes:
    """Return what precedes the data of a safetensors file, whose tensors come in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    file: IO[bytes], specs: Sequence[TensorSpec], arrays: Iterator[mx.array]
) -> None:
    """Write a safetensors file tensor by tensor, in the order of ``specs``."""
    file.write(safetensors_header(specs))
    for spec, array in zip(specs, arrays, strict=True):
        data = buffer_of(array)
        if len(data) != spec.nbytes:
            raise ValueError(f"{spec.name} has {len(data)} bytes, not {spec.nbytes}")
        file.write(data)
