"""Gemma: scaled embeddings, wide heads."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    GELU,
    LayerShape,
    grouped_attention,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config, config.count("head_dim"), config.count("num_key_value_heads")
    )
    mlp = swiglu(hidden, config.count("intermediate_size"))
    return [layer_of(hidden, attention, mlp, activation=GELU)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, is_tied_by_config=False)
