"""Ministral 3: queries are scaled by their position."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    grouped_attention,
    head_dim,
    kv_heads,
    layer_of,
    swiglu,
    windows,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that see all positions before their own, or those of a window."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(config, head_dim(config), kv_heads(config))
    mlp = swiglu(hidden, config.count("intermediate_size"))
    return [layer_of(hidden, attention, mlp, window=window) for window in windows(config)]


FAMILY = Family(
    layers=layers,
    # Scales of weights in fp8, which mlx-lm multiplies in.
    dropped=r"self_attn\.rotary_emb\.inv_freq|activation_scale|weight_scale_inv",
    chooses_caches=True,
)
