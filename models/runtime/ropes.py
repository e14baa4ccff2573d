"""Give the layers of a model the rotary embeddings that its config.json asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models import rope_utils
from mlx_lm.models.deepseek_v2 import DeepseekV2YarnRotaryEmbedding

from shardmlx.models.runtime.stand_ins import InPlaceOf
from shardmlx.models.sizes.rope_parameters import (
    FULL,
    SAID,
    rope_of,
    rotated,
    scaling_of,
    tells_layers_apart,
    type_of,
)

ROPES = (nn.RoPE, rope_utils.YarnRoPE, rope_utils.Llama3RoPE, rope_utils.SuScaledRoPE)
"""Kinds of rotary embeddings that some families replace by the plain one."""

STATIC = (*ROPES, rope_utils.ProportionalRoPE, DeepseekV2YarnRotaryEmbedding)
"""Kinds whose frequencies do not change with the length of the text."""


def ropes_of(attention: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the module with the name of each of its own rotary embeddings of these kinds."""
    own = attention.children().items()
    return [(attention, name) for name, child in own if isinstance(child, STATIC)]


@contextmanager
def rotating(ropes: Sequence[tuple[nn.Module, str]], positions: mx.array) -> Iterator[None]:
    """Rotate the tokens (1, ..., T, D) of a row by their ``positions`` (T,), in this context."""
    before = [module[name] for module, name in ropes]
    for (module, name), rope in zip(ropes, before, strict=True):
        module[name] = InPlaceOf(rope, partial(_rotate, rope, positions))
    try:
        yield
    finally:
        for (module, name), rope in zip(ropes, before, strict=True):
            module[name] = rope


def _rotate(rope: Any, positions: mx.array, x: mx.array, *_: Any, **__: Any) -> mx.array:
    # Treat each position as if it were a sequence of one token, after so many others.
    apart = x.moveaxis(-2, 0)
    rotated = rope(apart.reshape(len(positions), -1, 1, x.shape[-1]), offset=positions)
    back: mx.array = rotated.reshape(apart.shape).moveaxis(0, -2)
    return back


def fit_ropes(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    """Replace plain rotary embeddings that differ from ``rope_parameters``.

    Some families' code ignores scaling, or knows one for all types of layers. If the file has no
    types of layers and the code has, the code is right. Returns the ignored types.
    """
    fields = config if config.get(SAID) else config.get("text_config") or {}
    if not fields.get(SAID):
        return []
    is_told_apart = tells_layers_apart(fields)
    layers = getattr(model, "layers", [])
    kinds = fields.get("layer_types") or ([] if is_told_apart else [FULL] * len(layers))
    wrong = []
    for kind, layer in zip(kinds, layers, strict=False):
        rope = rope_of(fields, kind)
        for path, module in layer.named_modules():
            if rope is None or not isinstance(module, ROPES):
                continue
            other = _wanted(module, rope, fields)
            if other is not None:
                wrong.append((layer, path, other, type_of(rope)))
            elif not is_told_apart:
                return []
    for layer, path, other, _ in wrong:
        layer.update_modules(tree_unflatten([(path, other)]))
    return sorted({kind for *_, kind in wrong})


def _wanted(
    module: nn.Module, rope: Mapping[str, Any], fields: Mapping[str, Any]
) -> nn.Module | None:
    """Return the right embedding; None if ``module`` is right."""
    if type(module) is not nn.RoPE:
        return None
    dims = module.dims
    base = rope.get("rope_theta", module.base)
    scaling = scaling_of(fields, rope)
    is_of_part = "qk_rope_head_dim" in fields or type_of(rope) == "proportional"
    if (share := rope.get("partial_rotary_factor")) is not None and not is_of_part:
        dims = rotated(fields, share)
    longest = fields.get("max_position_embeddings")
    other = rope_utils.initialize_rope(dims, base, module.traditional, scaling, longest)
    is_right = (
        type(other) is nn.RoPE
        and (other.dims, other.base) == (module.dims, module.base)
        and math.isclose(other.scale, module.scale)
    )
    return None if is_right else other
