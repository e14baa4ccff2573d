"""The headers of safetensors files: which tensors a model has and where their bytes lie.

Only headers are read, so that a truncated or damaged file is found before any weight is loaded.
Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardmlx.common.durable_files import read_exactly
from shardmlx.errors import UserError, file_access
from shardmlx.models.sizes.config_reader import check_pointer

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

INDEX_FILE = "model.safetensors.index.json"
MODEL_FILES = "model*.safetensors"
"""Pattern of the files of a directory that mlx-lm loads."""

LENGTH_BYTES = 8
"""Bytes at the beginning of a file that say how long its header is."""

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
AGAIN = "copy or download it again"
_OF_TORCH = (".bin", ".pt", ".pth", ".ckpt")


ReadBytes = Callable[[str, int, int], bytes]
"""A function of (file name, offset, count) that returns the bytes of a weight file."""

_PIECE = 4 << 20


def read_bytes(directory: Path, file: str, offset: int, count: int) -> bytes:
    """Return bytes of a file in a directory. Raises ``OSError`` if it ends before."""
    with (directory / file).open("rb") as content:
        return read_exactly(content.fileno(), offset, count, str(directory / file))


def header_of(tensors: Iterable[tuple[str, Sequence[int], str]], **metadata: str) -> bytes:
    """Return the bytes before the data of a file that mlx-lm reads, of tensors by name, shape and
    type, in the order of their data."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx", **metadata}}
    offset = 0
    for name, shape, dtype in tensors:
        end = offset + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor at the bytes ``start`` to ``end`` of ``file``, which is empty until one exists; or a
    part of one: the first ``run`` of each ``stride`` bytes there."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    run: int = 1
    stride: int = 1

    @property
    def nbytes(self) -> int:
        """The number of bytes that are taken."""
        return -(-(self.end - self.start) // self.stride) * self.run

    def pieces(self, read: ReadBytes) -> Iterator[bytes]:
        """Yield the bytes in pieces, of each stride its run. Raises what ``read`` raises."""
        step = max(1, _PIECE // self.stride) * self.stride
        for start in range(self.start, self.end, step):
            piece = read(self.file, start, min(step, self.end - start))
            if self.run < self.stride:
                begins = range(0, len(piece), self.stride)
                piece = b"".join([piece[at : at + self.run] for at in begins])
            yield piece

    def places(self, done: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield, of so many bytes after the first that are ``done``, those that lie together: where
        they begin in the file, and how many they are."""
        if self.run == self.stride:
            yield self.start + done, count
            return
        end = done + count
        while done < end:
            row, within = divmod(done, self.run)
            length = min(self.run - within, end - done)
            yield self.start + row * self.stride + within, length
            done += length


@dataclass(frozen=True, slots=True)
class Header:
    """The description in the ``head`` of a file, all of its bytes before the data."""

    tensors: Mapping[str, PlacedTensor]
    head: bytes
    file_size: int
    metadata: Mapping[str, str]


def read_header(path: str | Path) -> Header:
    """Read and check one file's header; ``UserError`` names the file and the tensor."""
    with file_access("read", path), open(path, "rb") as file:
        file_size = file.seek(0, 2)
        file.seek(0)
        text = file.read(header_length(file.read(LENGTH_BYTES), file_size, path))
    return parse_header(text, file_size, path)


def header_length(prefix: bytes, file_size: int, where: str | Path) -> int:
    """Return the JSON header's length from a file's first bytes, or raise ``UserError``."""
    if prefix == b"version ":
        raise UserError(f"{where} is a git-lfs pointer, not the file: run git lfs pull")
    length = int.from_bytes(prefix, "little")
    if length > _MAX_HEADER_BYTES:
        raise UserError(
            f"{where} is not a safetensors file: it claims a header of {length} bytes, over "
            f"{_MAX_HEADER_BYTES}: {AGAIN}"
        )
    missing = LENGTH_BYTES + length - file_size
    if missing > 0:
        raise UserError(
            f"{where} is truncated: {missing} bytes of its header and all of its data are "
            f"missing: {AGAIN}"
        )
    return length


def parse_header(text: bytes, file_size: int, where: str | Path) -> Header:
    """Check the JSON header of a file of ``file_size`` bytes; ``UserError`` names the tensor."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: its header is not valid JSON: {AGAIN}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: its header is not a JSON object: {AGAIN}")
    metadata = content.pop("__metadata__", None) or {}
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    data_offset = len(head)
    tensors = {
        name: _tensor(entry, Path(where).name, data_offset, f"{where}: tensor {name!r}")
        for name, entry in content.items()
    }
    # They fill the data from end to end, without holes and overlaps.
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end))
    reached = data_offset
    for name, tensor in in_order:
        if tensor.start != reached:
            fault = "overlaps the one before" if tensor.start < reached else "leaves a hole before"
            raise UserError(
                f"{where}: tensor {name!r} {fault}: it starts at byte {tensor.start - data_offset} "
                f"of the data, not {reached - data_offset}: {AGAIN}"
            )
        reached = tensor.end
    if reached > file_size:
        name = next(name for name, tensor in in_order if tensor.end > file_size)
        raise UserError(
            f"{where} is truncated: {reached - file_size} bytes are missing, from tensor {name!r} "
            f"on: {AGAIN}"
        )
    if reached < file_size:
        raise UserError(f"{where} has {file_size - reached} bytes after its last tensor: {AGAIN}")
    return Header(tensors, head, file_size, metadata)


def parse_index(text: bytes, where: str | Path) -> Mapping[str, str]:
    """Return each tensor's file by a ``model.safetensors.index.json``; ``UserError`` when it is
    none."""
    check_pointer(text, where)
    try:
        files: Mapping[str, str] = json.loads(text)["weight_map"]
        if not all(isinstance(name, str) for name in files.values()):
            raise TypeError("no file names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{where} is not an index with a weight_map: {AGAIN}") from None
    return files


def check_weights(where: str | Path, files: Sequence[str]) -> None:
    """Refuse a model whose files have no weights that mlx-lm loads."""
    if any(fnmatchcase(file, MODEL_FILES) for file in files):
        return
    problem = f"{where} has no {MODEL_FILES}"
    remedy = "copy or download the weights too"
    others = [file for file in files if file.endswith((*_OF_TORCH, ".gguf", ".safetensors"))]
    if others:
        problem += f", but {others[0]}"
        remedy = "use the same model in the Hugging Face layout, with its weights in safetensors"
    if any(file.endswith(_OF_TORCH) for file in others):
        remedy = (
            "where torch is, write them as safetensors: python -c 'from transformers import "
            f'AutoModelForCausalLM as M; M.from_pretrained("{where}").save_pretrained("NEW")\''
        )
    raise UserError(problem, remedy)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor(entry: Any, file: str, data_offset: int, where: str) -> PlacedTensor:
    fields = entry if isinstance(entry, dict) else {}
    values: list[Any] = [fields.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = values
    if isinstance(dtype, str) and dtype not in DTYPE_BITS:
        raise UserError(
            f"{where} has dtype {dtype!r}: convert it to one of {', '.join(DTYPE_BITS)}"
        )
    is_sound = (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(map(_is_size, [*shape, *offsets]))
        and (offsets[1] - offsets[0]) * 8 == math.prod(shape) * DTYPE_BITS[dtype]
    )
    if not is_sound:
        raise UserError(f"{where} cannot be {str(entry)[:200]}: {AGAIN}")
    start, end = offsets
    return PlacedTensor(file, dtype, tuple(shape), data_offset + start, data_offset + end)
