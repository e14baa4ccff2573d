"""OLMo 3: OLMo 2 with windows in three of four layers."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    every_nth_full,
    grouped_attention,
    head_dim,
    kv_heads,
    layer_of,
    swiglu,
    windows,
)

NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def layers(config: Config) -> list[LayerShape]:
    """Return layers that see all positions before their own, or those of a window."""
    hidden = config.count("hidden_size")
    bias = config.switch("attention_bias", False)
    attention = grouped_attention(
        config, head_dim(config), kv_heads(config), bias=bias, output_bias=bias, norms="whole"
    )
    mlp = swiglu(hidden, config.count("intermediate_size"))
    seen = every_nth_full(config, 4) if config.get("layer_types") is None else windows(config)
    return [layer_of(hidden, attention, mlp, norms=NORMS, window=window) for window in seen]


FAMILY = Family(layers=layers, tied=False, chooses_caches=True)
