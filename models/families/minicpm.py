"""MiniCPM: scaled embeddings, residuals and logits."""

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
    # mlx-lm adds an lm_head to the tensors of a tied model, and then refuses it.
    config.only("tie_word_embeddings", False)
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(config, dim, config.count("num_key_value_heads"))
    mlp = swiglu(hidden, config.count("intermediate_size"))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=False)
