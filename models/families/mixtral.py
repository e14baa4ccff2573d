"""Mixtral: a mixture of experts in each layer."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, layer_of
from shardmlx.models.mixture_blocks import expert_mlps


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(config, dim, config.count("num_key_value_heads"))
    mlp = expert_mlps(
        config,
        config.count("intermediate_size"),
        "num_local_experts",
        "num_experts_per_tok",
        path="block_sparse_moe",
        stored=("w1", "w3", "w2"),
    )
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=False, has_gguf=True)
