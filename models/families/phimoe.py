"""Phi-3.5 MoE: layer norms, and biases of attention and of the lm_head."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, layer_of
from shardmlx.models.mixture_blocks import expert_mlps


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    attention = grouped_attention(
        config,
        config.share("hidden_size", "num_attention_heads"),
        config.count("num_key_value_heads"),
        bias=True,
        output_bias=True,
    )
    mlp = expert_mlps(
        config,
        config.count("intermediate_size"),
        "num_local_experts",
        "num_experts_per_tok",
        path="block_sparse_moe",
        stored=("w1", "w3", "w2"),
    )
    layer = layer_of(config.count("hidden_size"), attention, mlp, norm_bias=True)
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    tied=False,
    is_tied_by_config=False,
    final_norm_has_bias=True,
    head_has_bias=True,
)
