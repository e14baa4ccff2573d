"""List the tensors of a model: names, as mlx-lm and Hugging Face have them, and shapes.

No MLX, no MPI.

Follows mlx-lm's model files and ``mlx_lm.utils.load_model``, which decide what is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardmlx.errors import UserError
from shardmlx.models.shape import ModelShape
from shardmlx.models.traits import TRAITS

DEFAULTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
)
"""Default (bits, group size) of each mode in which MLX quantises."""

QUANTISED_PARTS = ("scales", "biases", "global_scale")
"""Tensors beside a quantised weight. ``biases`` are of the groups, a ``bias`` of the layer."""

_WORD_BITS = 32
_ALWAYS_ONE_PAIR = ("mxfp4", "nvfp4", "mxfp8")
_AGAIN = "convert the model again with mlx_lm.convert"
_HF_EXPERTS = MappingProxyType({"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"})
_FIRST_EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


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
        """Return the shapes of what replaces a weight of this shape; the last axis is grouped."""
        *rows, columns = weight
        scales = (*rows, columns // self.group_size)
        packed = (*rows, columns * self.bits // _WORD_BITS)
        is_affine = self.mode == "affine"
        return {"weight": packed, "scales": scales} | ({"biases": scales} if is_affine else {})


@dataclass(frozen=True, slots=True)
class QuantisationConfig:
    """The ``quantization`` of a config.json: the model's, and that of single modules.

    A module whose entry is None is not quantised; one without an entry is, if it has scales.
    """

    default: Quantisation
    modules: Mapping[str, Quantisation | None]

    def of(self, module: str) -> Quantisation | None:
        """Return what the config says of a module, such as ``model.layers.0.mlp.up_proj``."""
        return self.modules.get(module, self.default)


def read_quantisation(config: Mapping[str, Any]) -> QuantisationConfig | None:
    """Read the quantisation in a config.json of mlx-lm; None where MLX quantised no weights."""
    entry = config.get("quantization")
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise UserError(f"config.json: quantization is {entry!r}", _AGAIN)
    default = _quantisation(entry, "config.json: quantization")
    modules: dict[str, Quantisation | None] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            modules[key] = _quantisation(value, f"config.json: quantization of {key}")
        elif value is False:
            modules[key] = None
    return QuantisationConfig(default, MappingProxyType(modules))


def _quantisation(entry: Mapping[str, Any], where: str) -> Quantisation:
    mode = entry.get("mode", "affine")
    bits, group_size = DEFAULTS.get(mode, (4, 64)) if isinstance(mode, str) else (4, 64)
    try:
        return Quantisation(entry.get("bits", bits), entry.get("group_size", group_size), mode)
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {error}") from None


def infer_quantisation(
    packed: int, scales: int, scales_dtype: str, columns: int | None, hint: Quantisation | None
) -> Quantisation | None:
    """Return how a weight was packed, from its last axis, in words, and that of its scales.

    ``columns`` is the last axis before packing, where it is known; ``hint`` what is likely else.
    None when nothing fits.
    """
    modes = ("affine",) if scales_dtype != "U8" else _ALWAYS_ONE_PAIR
    found = []
    for mode in modes:
        pairs = (
            [(bits, group) for group in (64, 32, 128, 16) for bits in (4, 8, 3, 6, 5, 2)]
            if mode == "affine"
            else [DEFAULTS[mode]]
        )
        found += [
            Quantisation(bits, group, mode)
            for bits, group in pairs
            if packed * _WORD_BITS == scales * group * bits and columns in (None, scales * group)
        ]
    return hint if hint in found else next(iter(found), None)


@dataclass(frozen=True, slots=True)
class Module:
    """A module with a ``weight``. ``is_quantisable``: a linear layer, or the embedding."""

    weight: tuple[int, ...]
    bias: tuple[int, ...] | None = None
    is_quantisable: bool = True


def modules(shape: ModelShape, *, separate_experts: bool = False) -> dict[str, Module]:
    """Return the modules that have weights, by path, in the order of the model.

    ``separate_experts``: mixtral's experts one by one, as Hugging Face stores them; mlx-lm
    stacks them.
    """
    hidden, vocabulary = shape.hidden_size, shape.vocab_size
    result = {"model.embed_tokens": Module((vocabulary, hidden))}
    for layer in range(shape.num_layers):
        for path, module in _layer(shape, separate_experts):
            result[f"model.layers.{layer}.{path}"] = module
    result["model.norm"] = _norm(hidden)
    if not shape.tied:
        result["lm_head"] = Module((vocabulary, hidden))
    return result


def _norm(size: int) -> Module:
    return Module((size,), is_quantisable=False)


def _linear(rows: int, columns: int, has_bias: bool = False) -> Module:
    return Module((rows, columns), (rows,) if has_bias else None)


def _layer(shape: ModelShape, separate_experts: bool) -> Iterator[tuple[str, Module]]:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "input_layernorm", _norm(hidden)
    yield "self_attn.q_proj", _linear(queries, hidden, shape.qkv_bias)
    yield "self_attn.k_proj", _linear(keys, hidden, shape.qkv_bias)
    yield "self_attn.v_proj", _linear(keys, hidden, shape.qkv_bias)
    yield "self_attn.o_proj", _linear(hidden, queries, shape.output_bias)
    if shape.qk_norm:
        yield "self_attn.q_norm", _norm(shape.head_dim)
        yield "self_attn.k_norm", _norm(shape.head_dim)
    yield "post_attention_layernorm", _norm(hidden)
    sizes = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    if not shape.num_experts:
        for name, (rows, columns) in sizes.items():
            yield f"mlp.{name}", _linear(rows, columns, shape.mlp_bias)
        return
    yield "block_sparse_moe.gate", _linear(shape.num_experts, hidden)
    if not separate_experts:
        for name, (rows, columns) in sizes.items():
            module = Module((shape.num_experts, rows, columns))
            yield f"block_sparse_moe.switch_mlp.{name}", module
        return
    for expert in range(shape.num_experts):
        for name, (rows, columns) in sizes.items():
            yield f"block_sparse_moe.experts.{expert}.{_HF_EXPERTS[name]}", _linear(rows, columns)


def has_separate_experts(names: Mapping[str, Any]) -> bool:
    """Return whether these are the tensors of a mixtral as Hugging Face stores it."""
    return _FIRST_EXPERT in names


def expected_tensors(
    modules: Mapping[str, Module], quantised: Callable[[str, Module], Quantisation | None]
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor; ``quantised`` says how a module is packed."""
    result: dict[str, tuple[int, ...]] = {}
    for path, module in modules.items():
        how = quantised(path, module) if module.is_quantisable else None
        shapes = {"weight": module.weight} if how is None else how.shapes(module.weight)
        if module.bias is not None:
            shapes["bias"] = module.bias
        result |= {f"{path}.{part}": shape for part, shape in shapes.items()}
    return result


def is_dropped(name: str, shape: ModelShape) -> bool:
    """Return whether mlx-lm passes over a tensor of this name when it loads the model."""
    if shape.tied and name == "lm_head.weight":
        return True
    if "self_attn.rotary_emb.inv_freq" in name:
        return TRAITS[shape.model_type].drops_frequencies
    # The scales of weights in fp8, which mlx-lm multiplies in.
    return shape.model_type == "ministral3" and bool(
        re.search(r"activation_scale|weight_scale_inv", name)
    )
