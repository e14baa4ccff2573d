"""Read the shape of an undeclared model from its tensors and common fields of config.json. No MLX,
no MPI.

Names and sizes are exact: layers, bytes, parameters. The use of tensors in a layer is guessed from
their names and sides, so times and the memory of activations are approximate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardmlx.models.config_reader import MOST_LAYERS
from shardmlx.models.layer_shape import Activation, Heads, LayerShape, Linear, Norm
from shardmlx.models.shape import ModelShape, Names

Sides = tuple[int, ...]

_LAYER = re.compile(r"(?P<list>(?:^|.*?\.)(?:layers|h|blocks)\.)(?P<number>\d{1,5})\.(?P<path>.+)")
_EXPERT = re.compile(r"(?P<before>.*experts\.)\d+(?P<after>\..+)")
_ATTENTION = re.compile(r"attn|attention|\bq_proj|\bk_proj|\bv_proj|qkv|norm_attn")
_OUTPUT = re.compile(r"(?:o_proj|out_proj|c_proj|dense|\bwo|attn_out|output)$")
_STATE = re.compile(r"A_log|dt_bias|\bdt_proj|ssm|conv1d|\bconv\.|rg_lru|mamba|x_x$")
_NORM = re.compile(r"norm|\bln|_ln", re.IGNORECASE)
_IGNORED = re.compile(r"inv_freq|masked_bias")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
_GROUPS = ("num_key_value_heads", "n_head_kv", "kv_n_heads", "num_kv_heads")
_WIDTHS = ("head_dim", "kv_channels")
_USED = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "top_k")
_INNER = ("text_config", "attn_config", "ffn_config")


APPROXIMATE = (
    "no row of models/families declares this model: layers and their bytes are exact, times and "
    "the memory of activations approximate, and texts are generated one by one"
)
"""The words for such a model."""


def read_tensors(config: Mapping[str, Any], tensors: Mapping[str, Sides]) -> ModelShape | None:
    """Return the shape of an undeclared model from those of all tensors, unpacked; None if it is no
    decoder."""
    by_list: dict[str, dict[int, dict[str, Sides]]] = {}
    for name, sides in tensors.items():
        if (match := _LAYER.match(name)) and int(match["number"]) < MOST_LAYERS:
            layers = by_list.setdefault(match["list"], {})
            layers.setdefault(int(match["number"]), {})[match["path"]] = sides
    if not by_list:
        return None

    def size(name: str) -> int:
        parts = by_list[name].values()
        return sum(math.prod(sides) for layer in parts for sides in layer.values())

    longest = max(by_list, key=size)
    parts = by_list[longest]
    ends = {name: sides for name, sides in tensors.items() if not _LAYER.match(name)}
    names = _end_names(longest, ends, config)
    if sorted(parts) != list(range(len(parts))) or names is None:
        return None
    vocabulary, hidden = tensors[f"{names.embedding}.weight"]
    fields = dict(config)
    for inner in _INNER:
        if isinstance(config.get(inner), Mapping):
            fields |= config[inner]
    return ModelShape.of_layers(
        [_layer(parts[i], i, fields, hidden) for i in range(len(parts))],
        model_type=str(config.get("model_type")),
        text_type="",
        hidden_size=hidden,
        vocab_size=vocabulary,
        tied=not names.head,
        names=names,
        keeps_state=any(_STATE.search(path) for layer in parts.values() for path in layer),
    )


def _end_names(layers: str, ends: Mapping[str, Sides], config: Mapping[str, Any]) -> Names | None:
    """Return the names of embedding, norm and head; None without an embedding."""
    root = f"{layers.split('.')[0]}." if layers.count(".") > 1 else ""
    tables = {
        name.removesuffix(".weight"): sides
        for name, sides in ends.items()
        if name.endswith(".weight") and len(sides) == 2
    }
    most = max((sides[0] for sides in tables.values()), default=0)
    said = [name for name, sides in tables.items() if sides[0] == config.get("vocab_size")]
    wide = said or [name for name, sides in tables.items() if sides[0] == most]
    heads = [name for name in wide if re.search(r"head|out", name.rpartition(".")[2])]
    embeddings = [name for name in wide if name not in heads]
    if not embeddings:
        return None
    hidden = tables[embeddings[0]][1]
    norms = [
        name.removesuffix(".weight")
        for name, sides in ends.items()
        if name.endswith(".weight") and sides == (hidden,) and name.startswith(root)
    ]
    return Names(layers, embeddings[0], (norms or [""])[-1], (heads or [""])[0])


def _first(fields: Mapping[str, Any], keys: Sequence[str], layer: int, default: int) -> int:
    """Return the first field that is there; the layer's entry if it is a list."""
    for key in keys:
        value = fields.get(key)
        if isinstance(value, list) and layer < len(value):
            value = value[layer]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def _layer(
    parts: Mapping[str, Sides], i: int, fields: Mapping[str, Any], hidden: int
) -> LayerShape:
    """Return the shape of layer ``i`` of these tensors by path."""
    used = _first(fields, _USED, i, 1)
    heads = _heads(parts, i, fields, hidden)
    linears: dict[str, Linear] = {}
    norms: dict[str, Norm] = {}
    arrays: dict[str, Sides] = {}
    experts: dict[str, int] = {}
    for name, sides in parts.items():
        path, _, leaf = name.rpartition(".")
        if _IGNORED.search(name) or (leaf == "bias" and f"{path}.weight" in parts):
            continue
        if expert := _EXPERT.match(name):
            stored = f"{expert['before']}{{}}{expert['after']}".removesuffix(".weight")
            experts[stored] = experts.get(stored, 0) + 1
            path, sides = stored, (0, *sides)
        has_bias = f"{path}.bias" in parts
        if leaf == "weight" and len(sides) == 2:
            linears[path] = _linear(path, sides, hidden, has_bias)
        elif leaf == "weight" and len(sides) == 3 and "conv" not in path:
            linear = _linear(path, sides[1:], hidden, has_bias)
            number = experts.get(path, sides[0])
            linears[path] = linear._replace(
                source="product" if linear.source.startswith("product") else "experts",
                experts=number,
                uses=min(used, number),
                stored=path if path in experts else "",
            )
        elif leaf == "weight" and len(sides) == 1 and _NORM.search(path):
            norms[path] = Norm(sides[0], _elements(path, sides[0], heads, hidden), has_bias)
        else:
            arrays |= {each: parts[each] for each in (name, f"{path}.bias") if each in parts}
    return _with_mlp(linears, norms, arrays, heads)


def _heads(parts: Mapping[str, Sides], i: int, fields: Mapping[str, Any], hidden: int) -> Heads:
    """Return the heads of attention; none in a layer without it."""
    if not any(_ATTENTION.search(path) for path in parts):
        return Heads(0, 0, 0, 0, 0)
    queries = _first(fields, _HEADS, i, 1)
    groups = 1 if fields.get("multi_query") else _first(fields, _GROUPS, i, queries)
    width = _first(fields, _WIDTHS, i, max(1, hidden // queries))
    return Heads(queries, groups, width, width, 2 * groups * width)


def _linear(path: str, sides: Sides, hidden: int, has_bias: bool) -> Linear:
    outputs, inputs = sides
    source = "mlp"
    if _ATTENTION.search(path) or _STATE.search(path):
        source = "values" if _OUTPUT.search(path) else "attention"
        if "_b" in path:
            source = f"latent of {path}"
    elif outputs == hidden != inputs:
        source = f"product of {path}"
    return Linear(source, inputs, outputs, has_bias)


def _elements(path: str, size: int, heads: Heads, hidden: int) -> int:
    """Return the elements of a token in a norm: of all heads, if it is of one."""
    if size == hidden or size != heads.key_dim:
        return size
    return size * (heads.keys if re.search(r"\bk|key", path) else heads.queries)


def _with_mlp(
    linears: dict[str, Linear],
    norms: dict[str, Norm],
    arrays: dict[str, Sides],
    heads: Heads,
) -> LayerShape:
    """Return the layer, with the arrays that its activation keeps."""
    each = linears.values()
    joined = [one.outputs for one in each if one.source == "attention"]
    if len(joined) == 1 and joined[0] > heads.queries * heads.key_dim > 0:
        heads = heads._replace(joined=(heads.queries + heads.keys) * heads.key_dim)
    shape = LayerShape(
        linears=tuple(linears.items()),
        norms=tuple(norms.items()),
        arrays=tuple(arrays.items()),
        heads=heads,
    )
    # A gate and up are twice as wide as down.
    up = sum(one.uses * one.outputs for one in each if one.source in ("mlp", "experts"))
    return shape if up >= 2 * shape.mlp > 0 else replace(shape, activation=Activation(2))
