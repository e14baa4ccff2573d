"""Phi-3 and Phi-4: fused projections."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    fused,
    fused_swiglu,
    grouped_attention,
    kv_heads,
    layer_of,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    dim = config.share("hidden_size", "num_attention_heads")
    attention = fused(grouped_attention(config, dim, kv_heads(config)))
    mlp = fused_swiglu(hidden, config.count("intermediate_size"))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=False)
