"""Command R7B and Command A: attention beside the MLP, windows in three of four layers."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    every_nth_full,
    grouped_attention,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that see all positions before their own, or those of a window."""
    hidden = config.count("hidden_size")
    bias = config.switch("attention_bias")
    config.only("layer_norm_bias", False)
    attention = grouped_attention(
        config,
        config.count("head_dim"),
        config.count("num_key_value_heads"),
        bias=bias,
        output_bias=bias,
    )
    # The MLP shares the norm's output with attention.
    mlp = swiglu(hidden, config.count("intermediate_size"), source="attention")
    return [
        layer_of(
            hidden,
            attention,
            mlp,
            norms=("input_layernorm",),
            window=window,
        )
        for window in every_nth_full(config, config.count("sliding_window_pattern"))
    ]


FAMILY = Family(
    layers=layers,
    defaults={
        "hidden_size": 4096,
        "head_dim": 128,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 256000,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    is_tied_by_config=False,
    chooses_caches=True,
)
