"""Qwen3 MoE: experts in every layer, in some of them, or not in those that are named."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, kv_heads, layer_of, swiglu
from shardmlx.models.mixture_blocks import expert_mlps


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are dense where config.json says so."""
    hidden, step = config.count("hidden_size"), config.count("decoder_sparse_step")
    attention = grouped_attention(config, config.count("head_dim"), kv_heads(config), norms="head")
    dense = layer_of(hidden, attention, swiglu(hidden, config.count("intermediate_size")))
    if not config.number("num_experts", 0):
        return [dense] * config.count("num_hidden_layers")
    width = config.count("moe_intermediate_size")
    sparse = layer_of(
        hidden, attention, expert_mlps(config, width, "num_experts", "num_experts_per_tok")
    )
    plain = config.get("mlp_only_layers", ())
    return [
        dense if i in plain or (i + 1) % step else sparse
        for i in range(config.count("num_hidden_layers"))
    ]


FAMILY = Family(layers=layers, tied=None)
