"""Hunyuan, dense: norms of each head behind the rotary embedding."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    grouped_attention,
    head_dim,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    bias = config.switch("attention_bias", False)
    attention = grouped_attention(
        config,
        head_dim(config),
        config.count("num_key_value_heads"),
        bias=bias,
        output_bias=bias,
        norms="head" if config.switch("use_qk_norm", True) else "",
        norm_names=("query_layernorm", "key_layernorm"),
    )
    mlp = swiglu(hidden, config.count("intermediate_size"))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=False)
