"""Qwen1.5 and Qwen2 MoE: experts, and a shared expert behind its own gate."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    MLP,
    Block,
    LayerShape,
    Linear,
    grouped_attention,
    kv_heads,
    layer_of,
    swiglu,
)
from shardmlx.models.mixture_blocks import expert_mlps, with_shared


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(config, dim, kv_heads(config), bias=True)
    width = config.count("moe_intermediate_size")
    experts = expert_mlps(config, width, "num_experts", "num_experts_per_tok")
    shared = swiglu(
        hidden, config.count("shared_expert_intermediate_size"), path="mlp.shared_expert"
    )
    gate = MLP(Block({"mlp.shared_expert_gate": Linear("mlp", hidden, 1)}), 0)
    mlp = with_shared(with_shared(experts, shared), gate)
    # The shared expert's answer, before its gate.
    layer = replace(layer_of(hidden, attention, mlp), kept=hidden)
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=False, is_tied_by_config=False)
