"""DeepSeekMoE: grouped attention, first dense layers, then experts of which some are shared."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention
from shardmlx.models.mixture_blocks import routed_layers


def layers(config: Config) -> list[LayerShape]:
    """Return layers of which the first are dense."""
    bias = config.switch("attention_bias", False)
    attention = grouped_attention(
        config,
        config.share("hidden_size", "num_attention_heads"),
        config.count("num_key_value_heads"),
        bias=bias,
        output_bias=bias,
    )
    return routed_layers(config, attention, correction="")


FAMILY = Family(layers=layers, tied=False, is_tied_by_config=False)
