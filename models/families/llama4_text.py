"""Llama 4's dense text models: some layers have no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, layer_of, swiglu


def layers(config: Config) -> list[LayerShape]:
    """Return layers of the same sizes."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config, config.count("head_dim"), config.count("num_key_value_heads")
    )
    mlp = swiglu(hidden, config.count("intermediate_size_mlp"), path="feed_forward")
    layer = layer_of(hidden, attention, mlp)
    if config.switch("use_qk_norm"):
        # Norms without weights.
        heads = attention.heads
        layer = replace(layer, kept=(heads.queries + heads.keys) * heads.key_dim)
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=None, head="output")
