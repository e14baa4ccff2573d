"""Gemma 3, text only: windows in five of six layers, norms of each head."""

from __future__ import annotations

from shardmlx.errors import UserError
from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    FULL,
    GELU_APPROX,
    LayerShape,
    every_nth_full,
    grouped_attention,
    layer_of,
    swiglu,
)

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that see all positions before their own, or those of a window."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config, config.count("head_dim"), config.count("num_key_value_heads"), norms="head"
    )
    mlp = swiglu(hidden, config.count("intermediate_size"))
    seen = every_nth_full(config, config.count("sliding_window_pattern"))
    kinds = config.each_layer("layer_types") or []
    if any((kind == FULL) != (window is None) for kind, window in zip(kinds, seen, strict=False)):
        raise UserError(
            f"config.json: layer_types is {kinds}, and sliding_window_pattern "
            f"{config.fields['sliding_window_pattern']}",
            f"mlx-lm needs every nth to be {FULL}, and n as sliding_window_pattern",
        )
    return [
        layer_of(hidden, attention, mlp, norms=NORMS, window=window, activation=GELU_APPROX)
        for window in seen
    ]


FAMILY = Family(
    layers=layers,
    defaults={
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    chooses_caches=True,
)
