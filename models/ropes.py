"""Give the layers of a model the rotary embeddings that its config.json asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.rope_utils import initialize_rope

from shardmlx.models.rope_parameters import FULL, SAID, rope_of, rotated, scaling_of, type_of


def fit_ropes(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    """Replace plain rotary embeddings that are not what ``rope_parameters`` says.

    The code of some families passes over scaling, or knows one for all types of layers. Returns
    the types that were passed over.
    """
    fields = config if config.get(SAID) else config.get("text_config") or {}
    if not fields.get(SAID):
        return []
    passed_over = set()
    layers = getattr(model, "layers", [])
    kinds = fields.get("layer_types") or [FULL] * len(layers)
    for kind, layer in zip(kinds, layers, strict=False):
        if (rope := rope_of(fields, kind)) is None:
            continue
        for path, module in layer.named_modules():
            if type(module) is nn.RoPE and (other := _fitting(module, rope, fields)) is not None:
                layer.update_modules(tree_unflatten([(path, other)]))
                passed_over.add(type_of(rope))
    return sorted(passed_over)


def _fitting(
    module: nn.RoPE, rope: Mapping[str, Any], fields: Mapping[str, Any]
) -> nn.Module | None:
    """Return what must be in the place of an embedding; None where it is right."""
    dims, base = module.dims, rope.get("rope_theta", module.base)
    scaling = scaling_of(fields, rope)
    is_of_part = "qk_rope_head_dim" in fields or type_of(rope) == "proportional"
    if (share := rope.get("partial_rotary_factor")) is not None and not is_of_part:
        dims = rotated(fields, share)
    longest = fields.get("max_position_embeddings")
    other = initialize_rope(dims, base, module.traditional, scaling, longest)
    is_right = (
        type(other) is nn.RoPE
        and (other.dims, other.base) == (module.dims, module.base)
        and math.isclose(other.scale, module.scale)
    )
    return None if is_right else other
