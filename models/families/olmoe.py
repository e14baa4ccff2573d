"""OLMoE: norms of all heads of queries, and of keys, at once."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, head_dim, kv_heads, layer_of
from shardmlx.models.mixture_blocks import expert_mlps


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    bias = config.switch("attention_bias", False)
    attention = grouped_attention(
        config, head_dim(config), kv_heads(config), bias=bias, output_bias=bias, norms="whole"
    )
    mlp = expert_mlps(
        config,
        config.count("intermediate_size"),
        "num_experts",
        "num_experts_per_tok",
        bias=config.switch("mlp_bias", False),
    )
    hidden = config.count("hidden_size")
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers)
