"""Sort the tensors of a model by part, and tell how they are stored. No MLX, no MPI."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles
from shardmlx.modelfiles.published_packing import check_packing, published_packing
from shardmlx.modelfiles.safetensors_header import DTYPE_BITS, PlacedTensor
from shardmlx.modelfiles.tensors import (
    QUANTISED_PARTS,
    Module,
    Quantisation,
    QuantisationConfig,
    expected_tensors,
    is_dropped,
    modules,
    packing_of,
    read_quantisation,
)
from shardmlx.models.families import is_declared
from shardmlx.models.sizes.config_reader import MOST_LAYERS
from shardmlx.models.sizes.shape import ModelShape

EMBEDDING, HEAD, OTHER, DROPPED = "embedding", "head", "other", "not loaded"
"""Names of the parts other than decoder layers; ``head`` is the final norm and the head."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|model\.norm)\.")
_PACKED = ("U8", "I8", "I32", "U32", "F4", "F8_E4M3", "F8_E5M2")
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a part: its place, the parameters it stands for, and how it was packed."""

    name: str
    place: PlacedTensor
    parameters: int
    quantisation: Quantisation | None


@dataclass(frozen=True)
class Part:
    """The tensors of a layer, of embedding or head, of a stage or of the whole model."""

    tensors: tuple[Tensor, ...]

    @cached_property
    def parameters(self) -> int:
        """The number of elements in the tensors, before they were packed."""
        return sum(tensor.parameters for tensor in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """The bytes that the tensors take in their files."""
        return sum(tensor.place.nbytes for tensor in self.tensors)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The names of the files that have the tensors, in order."""
        return tuple(sorted({t.place.file for t in self.tensors if t.place.file}))

    @cached_property
    def dtypes(self) -> dict[str, int]:
        """Bytes of each dtype, the most first."""
        return _sums((tensor.place.dtype, tensor.place.nbytes) for tensor in self.tensors)

    @cached_property
    def quantisations(self) -> dict[str, int]:
        """Bytes of each packing, the most first; unpacked tensors are left out."""
        return _sums(
            (str(tensor.quantisation), tensor.place.nbytes)
            for tensor in self.tensors
            if tensor.quantisation is not None
        )


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals = Counter[str]()
    for key, value in pairs:
        totals[key] += value
    return dict(totals.most_common())


@dataclass(frozen=True)
class Inspection:
    """The parts of a model; ``shape`` is a decoder's. ``is_computed``: from it, without weights."""

    files: ModelFiles
    shape: ModelShape | None
    abilities: str
    layers: tuple[Part, ...]
    embedding: Part
    head: Part
    other: Part
    dropped: Part
    is_computed: bool

    @cached_property
    def tied(self) -> bool:
        """True where the embedding serves as lm_head, so that the last stage holds it too."""
        if self.shape is not None:
            return self.shape.tied
        return bool(self.embedding.tensors) and not any(
            "lm_head" in tensor.name for tensor in self.head.tensors
        )

    @cached_property
    def whole(self) -> Part:
        """The tensors of all layers, of both ends and of what belongs to neither."""
        return Part((*self.stage(0, len(self.layers)).tensors, *self.other.tensors))

    @cached_property
    def packing(self) -> str:
        """Words on another program's packing of the model, and its form after loading; or empty."""
        try:
            packing = published_packing(self.files.config)
            if self.shape is not None:
                check_packing(self.files.config, self.shape, self.files.tensors)
        except UserError as error:
            return str(error)
        if packing is None:
            return ""
        if not self.is_computed and not any(dtype in _PACKED for dtype in self.whole.dtypes):
            return f"config.json says that {packing.method} packed it, but no tensor is packed"
        return str(packing)

    def stage(self, start: int, stop: int) -> Part:
        """Return the tensors of the stage with layers ``start`` to ``stop``."""
        is_last = stop == len(self.layers)
        holds_embedding = start == 0 or (is_last and self.tied)
        return Part(
            (
                *(self.embedding.tensors if holds_embedding else ()),
                *(tensor for layer in self.layers[start:stop] for tensor in layer.tensors),
                *(self.head.tensors if is_last else ()),
            )
        )


def inspect_files(files: ModelFiles) -> Inspection:
    """Put every tensor into its part; ``UserError`` for a config.json that contradicts itself."""
    found = shape_of(files)
    shape = None if isinstance(found, str) else found
    is_computed = not files.tensors
    tensors = planned_tensors(files.config) if is_computed else dict(files.tensors)
    columns = {}
    if shape is not None:
        family = modules(shape)
        columns = {path: each.weight[-1] for path, each in family.items() if each.is_quantisable}
    quantisation = read_quantisation(files.config) if "quantization" in files.config else None
    parts: dict[str | int, list[Tensor]] = {}
    for name, place in tensors.items():
        path, _, leaf = name.rpartition(".")
        how = None
        if leaf in ("weight", *QUANTISED_PARTS):
            weight, scales = (tensors.get(f"{path}.{each}") for each in ("weight", "scales"))
            hint = quantisation.of(path) if quantisation is not None else None
            how = packing_of(weight, scales, columns.get(path), hint)
        parameters = math.prod(place.shape)
        if how is not None:
            # Counted like mlx-lm: the weights that packed words encode, without scales.
            parameters = parameters * 32 // how.bits if leaf == "weight" else 0
        tensor = Tensor(name, place, parameters, how)
        parts.setdefault(part_of(name, shape), []).append(tensor)
    present = [key for key in parts if isinstance(key, int)]
    count = shape.num_layers if shape is not None else max(present, default=-1) + 1
    return Inspection(
        files=files,
        shape=shape,
        abilities=f"cannot run: {found}" if isinstance(found, str) else found.abilities,
        layers=tuple(Part(tuple(parts.get(i, ()))) for i in range(count)),
        embedding=Part(tuple(parts.get(EMBEDDING, ()))),
        head=Part(tuple(parts.get(HEAD, ()))),
        other=Part(tuple(parts.get(OTHER, ()))),
        dropped=Part(tuple(parts.get(DROPPED, ()))),
        is_computed=is_computed,
    )


def read_shape(
    config: Mapping[str, Any], tensors: Mapping[str, PlacedTensor] = MappingProxyType({})
) -> ModelShape:
    """Return the shape of a model; MLX is started for one that no row declares. Raises
    ``UserError`` for a broken config.json, or for a model that cannot be divided."""
    if is_declared(config):
        return ModelShape.from_config(config)
    sides = tuple((name, place.shape) for name, place in tensors.items())
    return _traced(json.dumps(config, sort_keys=True), sides)


@lru_cache(maxsize=64)
def _traced(config: str, sides: tuple[tuple[str, tuple[int, ...]], ...]) -> ModelShape:
    """Return the shape of a model that no row declares; a run asks twice, and a large one takes
    seconds. A shape is small: those of many models are kept."""
    fields = json.loads(config)
    with needs_mlx_lm(fields.get("model_type")):
        from shardmlx.models.sizes.undeclared import traced_shape
    return traced_shape(fields, dict(sides))


@contextmanager
def needs_mlx_lm(kind: object) -> Iterator[None]:
    """Import parts of mlx-lm in the block. Raises ``UserError`` if it is not installed."""
    try:
        yield
    except ImportError:
        raise UserError(
            f"models of type {kind!r} are read with mlx-lm, which is not installed",
            "pip install mlx-lm",
        ) from None


def shape_of(files: ModelFiles) -> ModelShape | str:
    """Return the model's shape, or why these tensors have none, as those of a model that cannot be
    divided. Raises ``UserError`` for a broken config.json."""
    try:
        return read_shape(files.config, files.tensors)
    except UserError as error:
        if not files.tensors or is_declared(files.config):
            raise
        return error.problem


def needed_shape(files: ModelFiles) -> ModelShape:
    """Return the model's shape. Raises ``UserError`` if it has none."""
    shape = read_shape(files.config, files.tensors)
    check_packing(files.config, shape)
    return shape


def part_of(name: str, shape: ModelShape | None) -> str | int:
    """Return the part that a tensor belongs to: the number of its layer, or a name."""
    if shape is not None and is_dropped(name, shape):
        return DROPPED
    place = place_of(name, shape)
    is_further = shape is not None and isinstance(place, int) and place >= shape.num_layers
    return OTHER if is_further else place


def place_of(name: str, shape: ModelShape | None) -> str | int:
    """Return the part that a tensor belongs to by its name: layers may come after the last."""
    if shape is not None:
        # An undeclared model may have other lists of layers.
        is_other = not shape.is_declared and not name.startswith(shape.names.layers)
        if is_other and _LAYER.search(name):
            return OTHER
    if match := _LAYER.search(name):
        # Python converts no number of thousands of digits.
        is_layer = len(match[1]) <= len(str(MOST_LAYERS)) and int(match[1]) < MOST_LAYERS
        return int(match[1]) if is_layer else OTHER
    if shape is not None and name.rpartition(".")[0] in dict(shape.before):
        return 0
    if shape is not None and name.rpartition(".")[0] in dict(shape.after):
        return HEAD
    if "embed_tokens." in name or (shape and name.startswith(f"{shape.names.embedding}.")):
        return EMBEDDING
    ends = () if shape is None else (f"{shape.names.norm}.", f"{shape.names.head}.")
    if _HEAD.search(name) or name.startswith(ends):
        return HEAD
    return OTHER


def planned_tensors(config: Mapping[str, Any]) -> dict[str, PlacedTensor]:
    """Return the tensors that mlx-lm would write for this config.json; no file exists yet."""
    shape = read_shape(config)
    quantisation = read_quantisation(config)
    dtype = _FLOATS.get(str(config.get("torch_dtype", config.get("dtype"))), "BF16")
    shapes = expected_tensors(modules(shape), partial(_quantised, quantisation))
    result: dict[str, PlacedTensor] = {}
    for name, sides in shapes.items():
        path, _, leaf = name.rpartition(".")
        own = dtype
        if f"{path}.scales" in shapes and leaf == "weight":
            own = "U32"
        elif leaf == "scales" and f"{path}.biases" not in shapes:
            own = "U8"
        result[name] = PlacedTensor("", own, sides, 0, math.prod(sides) * DTYPE_BITS[own] // 8)
    return result


def _quantised(
    quantisation: QuantisationConfig | None, path: str, module: Module
) -> Quantisation | None:
    """Return how a module is quantised; None for one whose rows are no whole groups."""
    how = quantisation.of(path) if quantisation is not None else None
    return how if how is not None and module.weight[-1] % how.group_size == 0 else None


def rows(inspection: Inspection, fold: bool = True) -> dict[str, tuple[Part, ...]]:
    """Return the parts by name, in the order of the model; ``fold`` equal neighbouring layers."""
    layers = inspection.layers
    found: dict[str, tuple[Part, ...]] = {EMBEDDING: (inspection.embedding,)}
    for _, alike in groupby(range(len(layers)), lambda i: _look(layers[i]) if fold else i):
        numbers = [*alike]
        start = numbers[0]
        last = numbers[-1]
        name = f"layer {start}" if start == last else f"layers {start}-{last}"
        found[name] = layers[start : last + 1]
    after = {"norm and head": inspection.head, OTHER: inspection.other, DROPPED: inspection.dropped}
    found |= {name: (part,) for name, part in after.items()}
    return {
        name: parts for name, parts in found.items() if name.startswith("layer") or parts[0].tensors
    }


def _look(part: Part) -> Sequence[tuple[Any, ...]]:
    return sorted(
        (_LAYER.sub(".", t.name), t.place.dtype, t.place.shape, str(t.quantisation))
        for t in part.tensors
    )
