"""Llama, and Mistral, which mlx-lm builds of the same file."""

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
    bias = config.switch("attention_bias", False)
    attention = grouped_attention(
        config, head_dim(config), kv_heads(config), bias=bias, output_bias=bias
    )
    mlp = swiglu(hidden, config.count("intermediate_size"), bias=config.switch("mlp_bias", False))
    return [layer_of(hidden, attention, mlp, window=window) for window in windows(config)]


FAMILY = Family(
    layers=layers,
    model_types=("mistral",),
    dropped=r"self_attn\.rotary_emb\.inv_freq",
    chooses_caches=True,
    has_gguf=True,
)
