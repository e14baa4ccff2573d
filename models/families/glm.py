"""GLM-4 of 2024, and GLM-Edge: gate and up projection as one matrix."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    fused_swiglu,
    grouped_attention,
    head_dim,
    layer_of,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config,
        head_dim(config),
        config.count("num_key_value_heads"),
        bias=config.switch("attention_bias", False),
    )
    mlp = fused_swiglu(hidden, config.count("intermediate_size"))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, dropped=r"self_attn\.rotary_emb\.inv_freq")
