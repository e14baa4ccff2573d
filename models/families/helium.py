"""Helium: Llama with traditional rotary embedding."""

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
    # mlx-lm gives a tied model an lm_head as well, which it loads and ignores.
    config.only("tie_word_embeddings", False)
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(
        config, dim, config.count("num_key_value_heads"), bias=config.switch("attention_bias")
    )
    mlp = swiglu(hidden, config.count("intermediate_size"), bias=config.switch("mlp_bias"))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=None)
