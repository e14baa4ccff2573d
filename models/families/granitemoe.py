"""Granite 3 MoE: embeddings, residuals and logits are scaled, and experts stored as one array."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, layer_of
from shardmlx.models.mixture_blocks import expert_mlps


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden, bias = config.count("hidden_size"), config.switch("attention_bias")
    attention = grouped_attention(
        config,
        config.share("hidden_size", "num_attention_heads"),
        config.count("num_key_value_heads"),
        bias=bias,
        output_bias=bias,
    )
    mlp = expert_mlps(
        config,
        config.count("intermediate_size"),
        "num_local_experts",
        "num_experts_per_tok",
        path="block_sparse_moe",
        stored=(),
        router="router.layer",
    )
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, stored_otherwise=r"\.block_sparse_moe\.input_linear\.")
