"""List the tensors of a model, as mlx-lm and Hugging Face name them. No MLX, no MPI.

Follows mlx-lm's model files and ``mlx_lm.utils.load_model``, which decide the loaded tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardmlx.errors import UserError
from shardmlx.modelfiles.published_packing import Packing, published_packing
from shardmlx.modelfiles.safetensors_header import PlacedTensor
from shardmlx.models.sizes.layer_shape import LayerShape
from shardmlx.models.sizes.shape import ModelShape

DEFAULTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
)
"""Default (bits, group size) of each mode in which MLX quantises."""

QUANTISED_PARTS = ("scales", "biases", "global_scale")
"""Tensors beside a quantised weight. ``biases`` belong to groups, a ``bias`` to the layer."""

_WORD_BITS = 32
_COMPUTED = re.compile(r"rotary_emb\.inv_freq|attention\.rope\.inv_freq")
"""Names of buffers that mlx-lm computes by itself."""
_SCALES = re.compile(r"activation_scale$|_scale_inv$")
"""Names of scales, which mlx-lm multiplies into weights in fp8."""
OTHER_SENSES = re.compile(
    r"(?:^|\.)(?:vision_|visual\.|audio_)|embed_(?:vision|audio)\.|(?:multi_modal|mm)_projector\."
)
"""Names of tensors that read pictures or sounds, which mlx-lm passes over."""
_AGAIN = "convert the model again with mlx_lm.convert"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Weights of ``bits`` bits, packed into words of 32, with a scale for each ``group_size``."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode not in DEFAULTS:
            raise UserError(f"unknown mode {self.mode!r}", f"use one of {', '.join(DEFAULTS)}")
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise UserError(f"{self.bits!r} bits", _AGAIN)
        if self.group_size not in (16, 32, 64, 128):
            raise UserError(f"group_size {self.group_size!r}", _AGAIN)

    def __str__(self) -> str:
        mode = "" if self.mode == "affine" else f"{self.mode}, "
        return f"{mode}{self.bits}-bit, group {self.group_size}"

    def shapes(self, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of tensors that replace a weight, grouped on its last axis."""
        *rows, columns = weight
        scales = (*rows, columns // self.group_size)
        packed = (*rows, columns * self.bits // _WORD_BITS)
        is_affine = self.mode == "affine"
        return {"weight": packed, "scales": scales} | ({"biases": scales} if is_affine else {})


@dataclass(frozen=True, slots=True)
class QuantisationConfig:
    """The ``quantization`` of a config.json: the model's, and that of single modules.

    A module whose entry is None is not quantised; one without an entry is, if it has scales.
    ``published`` is another program's packing.
    """

    default: Quantisation
    modules: Mapping[str, Quantisation | None]
    published: Packing | None = None

    def of(self, module: str) -> Quantisation | None:
        """Return the quantisation of a module, such as ``model.layers.0.mlp.up_proj``."""
        if self.published is not None and not self.published.packs(module):
            return None
        return self.modules.get(module, self.default)

    @property
    def largest_group(self) -> int:
        """The most weights that share a scale."""
        found = (self.default, *self.modules.values())
        return max(each.group_size for each in found if each is not None)


def read_quantisation(config: Mapping[str, Any]) -> QuantisationConfig | None:
    """Read the quantisation of a config.json as mlx-lm loads it; None for plain weights."""
    entry = config.get("quantization")
    if entry is None:
        packing = published_packing(config)
        if packing is None or packing.loaded is None:
            return None
        return QuantisationConfig(Quantisation(*packing.loaded), {}, packing)
    if not isinstance(entry, dict):
        raise UserError(f"config.json: quantization is {entry!r}", _AGAIN)
    modules = {
        key: _quantisation(value, f" of {key}") if value is not False else None
        for key, value in entry.items()
        if isinstance(value, dict) or value is False
    }
    return QuantisationConfig(_quantisation(entry), modules)


def scale_group(config: Mapping[str, Any]) -> int:
    """Return the most weights of a model that share a scale; 1 if they are not quantised."""
    packing = read_quantisation(config)
    return 1 if packing is None else packing.largest_group


def _quantisation(entry: Mapping[str, Any], where: str = "") -> Quantisation:
    mode = entry.get("mode", "affine")
    bits, group_size = DEFAULTS.get(mode, (4, 64)) if isinstance(mode, str) else (4, 64)
    try:
        return Quantisation(entry.get("bits", bits), entry.get("group_size", group_size), mode)
    except (UserError, TypeError) as error:
        raise UserError(f"config.json: quantization{where}: {error}") from None


def packing_of(
    weight: PlacedTensor | None,
    scales: PlacedTensor | None,
    columns: int | None,
    hint: Quantisation | None,
) -> Quantisation | None:
    """Return how a weight with scales was packed; None if it was not. mlx-lm tells it from
    ``columns``, too; where these are unknown, ``hint`` is taken."""
    if weight is None or scales is None or not (weight.shape and scales.shape):
        return None
    if columns is None or not scales.shape[-1]:
        return hint
    bits = weight.shape[-1] * _WORD_BITS // columns
    group = columns // scales.shape[-1]
    modes = [mode for mode in DEFAULTS if mode != "affine" and DEFAULTS[mode] == (bits, group)]
    try:
        return Quantisation(bits, group, modes[0] if scales.dtype == "U8" and modes else "affine")
    except UserError:
        return hint


@dataclass(frozen=True, slots=True)
class Module:
    """A module with a ``weight``; a ``bare`` one is a plain array."""

    weight: tuple[int, ...]
    bias: tuple[int, ...] | None = None
    is_quantisable: bool = True
    bare: bool = False


def modules(shape: ModelShape) -> dict[str, Module]:
    """Return the modules with weights by path, in order."""
    hidden = shape.hidden_size
    vocabulary = shape.vocab_size
    result = {shape.names.embedding: Module((vocabulary, hidden))}
    for path, sides in (*shape.before, *shape.after):
        result[path] = Module(sides, is_quantisable=len(sides) > 1)
    for index in range(shape.num_layers):
        for path, module in _layer(shape.layer(index)):
            result[f"{shape.names.layers}{index}.{path}"] = module
    norm_bias = shape.family.norm_bias
    head_bias = shape.family.head_has_bias
    if shape.names.norm:
        result[shape.names.norm] = Module((hidden,), (hidden,) if norm_bias else None, False)
    if not shape.tied:
        result[shape.names.head] = Module(
            (vocabulary, hidden), (vocabulary,) if head_bias else None
        )
    return result


def _layer(layer: LayerShape) -> Iterator[tuple[str, Module]]:
    for path, norm in layer.norms:
        yield path, Module(norm.sides, norm.sides if norm.bias else None, is_quantisable=False)
    for path, linear in layer.linears:
        stacked = (linear.experts,) if linear.experts else ()
        bias = (*stacked, linear.outputs) if linear.bias else None
        yield path, Module((*stacked, linear.outputs, linear.inputs), bias)
    for path, array in layer.arrays:
        yield path, Module(array, is_quantisable=False, bare=True)


def expected_tensors(
    modules: Mapping[str, Module], quantised: Callable[[str, Module], Quantisation | None]
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor; ``quantised`` gives the packing of a module."""
    result: dict[str, tuple[int, ...]] = {}
    for path, module in modules.items():
        if module.bare:
            result[path] = module.weight
            continue
        how = quantised(path, module) if module.is_quantisable else None
        shapes = {"weight": module.weight} if how is None else how.shapes(module.weight)
        if module.bias is not None:
            shapes["bias"] = module.bias
        result |= {f"{path}.{part}": shape for part, shape in shapes.items()}
    return result


def is_dropped(name: str, shape: ModelShape) -> bool:
    """Return whether mlx-lm ignores a tensor of this name when it loads the model."""
    is_tied_head = shape.tied and "lm_head." in name
    if is_tied_head or _COMPUTED.search(name):
        return True
    is_scale = _SCALES.search(name)
    is_of_others = OTHER_SENSES.search(name)
    layer = re.match(rf"{re.escape(shape.names.layers)}(\d+)\.", name)
    is_further = layer is not None and int(layer[1]) >= shape.num_layers
    return name not in shape.refused and bool(is_scale or is_of_others or is_further)
