"""EXAONE 4: norms behind attention and MLP, windows in three of four layers."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    grouped_attention,
    layer_of,
    swiglu,
)

NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
LOCAL = "L"


def layers(config: Config) -> list[LayerShape]:
    """Return layers that see all positions before their own, or those of a window."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config, config.count("head_dim"), config.count("num_key_value_heads"), norms="head"
    )
    mlp = swiglu(hidden, config.count("intermediate_size"))
    pattern = config.get("sliding_window_pattern") or "G"
    window = config.count("sliding_window") if LOCAL in pattern else None
    return [
        layer_of(
            hidden,
            attention,
            mlp,
            norms=NORMS,
            window=window if pattern[i % len(pattern)] == LOCAL else None,
        )
        for i in range(config.count("num_hidden_layers"))
    ]


FAMILY = Family(layers=layers, tied=None, chooses_caches=True)
