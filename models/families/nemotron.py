"""Nemotron and Minitron: LayerNorm around one, an MLP of squared ReLU."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    Activation,
    LayerShape,
    grouped_attention,
    head_dim,
    layer_of,
    plain_mlp,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden, bias = config.count("hidden_size"), config.switch("attention_bias", False)
    attention = grouped_attention(
        config,
        head_dim(config),
        config.count("num_key_value_heads"),
        bias=bias,
        output_bias=bias,
    )
    mlp = plain_mlp(
        hidden, config.count("intermediate_size"), bias=config.switch("mlp_bias", False)
    )
    layer = layer_of(hidden, attention, mlp, norm_bias=True, activation=Activation(0))
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=False, final_norm_has_bias=True)
