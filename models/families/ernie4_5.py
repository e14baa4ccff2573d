"""ERNIE 4.5, dense: a bias in all linear layers, or in none."""

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
    bias = config.switch("use_bias")
    attention = grouped_attention(
        config,
        head_dim(config),
        config.count("num_key_value_heads"),
        bias=bias,
        output_bias=bias,
    )
    mlp = swiglu(hidden, config.count("intermediate_size"), bias=bias)
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=None)
