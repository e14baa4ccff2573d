"""How the decoder layers of each model family are called: all that differs between them.

The layers themselves are mlx-lm's. A family is a function of the model's arguments and the hidden
states (rows, T, D) of one micro-batch, which returns how to call one of its layers on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import ministral3
from mlx_lm.models.base import create_attention_mask

LayerCall = Callable[[nn.Module, mx.array], mx.array]
Family = Callable[[Any, mx.array], LayerCall]


def full_attention(args: Any, hidden: mx.array) -> LayerCall:
    """Every layer sees all positions before its own: qwen2, qwen3, mixtral."""
    mask = create_attention_mask(hidden)
    return lambda layer, x: layer(x, mask, None)


def sliding_attention(args: Any, hidden: mx.array) -> LayerCall:
    """Layers marked ``use_sliding`` see only a window: llama, mistral."""
    masks = _masks(args, hidden)
    return lambda layer, x: layer(x, masks[layer.use_sliding], None)


def scaled_sliding_attention(args: Any, hidden: mx.array) -> LayerCall:
    """As ``sliding_attention``, with queries scaled by position: ministral3."""
    masks = _masks(args, hidden)
    rope = args.rope_parameters
    scale = ministral3._get_llama_4_attn_scale(
        hidden.shape[1],
        0,
        rope["llama_4_scaling_beta"],
        rope["original_max_position_embeddings"],
    ).astype(hidden.dtype)
    return lambda layer, x: layer(x, scale, masks[layer.use_sliding], None)


def _masks(args: Any, hidden: mx.array) -> dict[bool, Any]:
    full = create_attention_mask(hidden)
    if "sliding_attention" not in args.layer_types:
        return {False: full}
    return {False: full, True: create_attention_mask(hidden, window_size=args.sliding_window)}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": sliding_attention,
        "mistral": sliding_attention,
        "ministral3": scaled_sliding_attention,
        "mixtral": full_attention,
        "qwen2": full_attention,
        "qwen3": full_attention,
    }
)
