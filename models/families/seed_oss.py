"""Seed-OSS: biases of queries, keys and values."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    grouped_attention,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config,
        config.count("head_dim"),
        config.count("num_key_value_heads"),
        bias=config.switch("attention_bias", False),
        output_bias=config.switch("attention_out_bias", False),
    )
    mlp = swiglu(hidden, config.count("intermediate_size"), bias=config.switch("mlp_bias", False))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers)
