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
from shardmlx.models.layer_shape import NO_HEADS, Activation, Heads, LayerShape, Linear, Norm
from shardmlx.models.shape import ModelShape, Names

Sides = tuple[int, ...]

_LAYER = re.compile(r"(?P<list>(?:^|.*?\.)(?:layers|h|blocks)\.)(?P<number>\d{1,5})\.(?P<path>.+)")
_EXPERT = re.compile(r"(?P<before>.*experts\.)\d+(?P<after>\..+)")
_ATTENTION = re.compile(r"attn|attention|\bq_proj|\bk_proj|\bv_proj|qkv|norm_attn")
_OUTPUT = re.compile(r"(?:o_proj|out_proj|c_proj|dense|\bwo|attn_out|output)$")
_STATE = re.compile(r"A_log|dt_bias|\bdt_proj|ssm|conv1d|\bconv\.|rg_lru|mamba|x_x$")
_PER_HEAD = re.compile(r"conv|embed_q|unembed_out")
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


def read_tensors(config: Mapping[str, Any], tensors: Mapping[str, Sides]) -> ModelShape | None:
    """Return the shape of an undeclared model from all its tensors; None if it is no decoder."""
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
        token_by_token=any(_loops(*part) for layer in parts.values() for part in layer.items()),
    )


def _loops(path: str, sides: Sides) -> bool:
    """Return whether a tensor is of a first Mamba, or of a gated linear recurrence."""
    return "rg_lru" in path or (path.endswith("A_log") and len(sides) == 2)


def _end_names(layers: str, ends: Mapping[str, Sides], config: Mapping[str, Any]) -> Names | None:
    """Return the names of embedding, norm and head; None without an embedding."""
    root = f"{layers.split('.')[0]}." if layers.count(".") > 1 else ""
    weights = {
        name.removesuffix(".weight"): sides
        for name, sides in ends.items()
        if name.endswith(".weight")
    }
    rows = {name: sides[0] for name, sides in weights.items() if len(sides) == 2}
    said = config.get("vocab_size")
    most = said if said in rows.values() else max(rows.values(), default=0)
    wide = [name for name in rows if rows[name] == most]
    heads = [name for name in wide if re.search(r"head|out", name.rpartition(".")[2])]
    embeddings = [name for name in wide if name not in heads]
    if not embeddings:
        return None
    width = weights[embeddings[0]][1:]
    norms = [name for name, sides in weights.items() if sides == width and name.startswith(root)]
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
    heads = _heads(parts, i, fields, hidden)
    linears: dict[str, Linear] = {}
    norms: dict[str, Norm] = {}
    arrays: dict[str, Sides] = {}
    experts: dict[str, int] = {}
    for name, sides in parts.items():
        path, _, leaf = name.rpartition(".")
        if _IGNORED.search(name) or (leaf == "bias" and f"{path}.weight" in parts):
            continue
        has_bias = f"{path}.bias" in parts
        if expert := _EXPERT.match(name):
            path = f"{expert['before']}{{}}{expert['after']}".removesuffix(".weight")
            experts[path] = experts.get(path, 0) + 1
            sides = (experts[path], *sides)
        if leaf == "weight" and len(sides) == 1 and _NORM.search(path):
            is_of_head = sides[0] == heads.key_dim != hidden
            elements = sides[0] * (heads.queries if is_of_head else 1)
            norms[path] = Norm(sides[0], elements, has_bias)
        elif leaf == "weight" and (
            len(sides) == 2 or (len(sides) == 3 and not _PER_HEAD.search(path))
        ):
            linears[path] = _linear(path, sides, hidden, has_bias)
        else:
            arrays |= {each: parts[each] for each in (name, f"{path}.bias") if each in parts}
    used = _first(fields, _USED, i, 1)
    for path, linear in linears.items():
        stored = path if path in experts else ""
        linears[path] = linear._replace(uses=min(used, linear.copies), stored=stored)
    joined = [each.outputs for each in linears.values() if each.source == "attention"]
    if len(joined) == 1 and joined[0] > heads.queries * heads.key_dim > 0:
        heads = heads._replace(joined=(heads.queries + heads.keys) * heads.key_dim)
    shape = LayerShape(
        linears=tuple(linears.items()),
        norms=tuple(norms.items()),
        arrays=tuple(arrays.items()),
        heads=heads,
    )
    # A gate and up are twice as wide as down.
    ups = [each for each in linears.values() if each.source in ("mlp", "experts")]
    has_gate = sum(each.uses * each.outputs for each in ups) >= 2 * shape.mlp > 0
    return shape if has_gate else replace(shape, activation=Activation(2))


def _heads(parts: Mapping[str, Sides], i: int, fields: Mapping[str, Any], hidden: int) -> Heads:
    if not any(_ATTENTION.search(path) for path in parts):
        return NO_HEADS
    queries = _first(fields, _HEADS, i, 1)
    groups = 1 if fields.get("multi_query") else _first(fields, _GROUPS, i, queries)
    width = _first(fields, _WIDTHS, i, max(1, hidden // queries))
    return Heads(queries, groups, width, width, 2 * groups * width)


def _linear(path: str, sides: Sides, hidden: int, has_bias: bool) -> Linear:
    *stacked, outputs, inputs = sides
    if outputs == hidden != inputs:
        source = f"product of {path}"
    elif stacked:
        source = "experts"
    else:
        source = "mlp"
    if _ATTENTION.search(path) or _STATE.search(path):
        source = "values" if _OUTPUT.search(path) else "attention"
        if "_b" in path:
            source = f"latent of {path}"
    return Linear(source, inputs, outputs, has_bias, experts=stacked[0] if stacked else 0)
