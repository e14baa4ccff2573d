"""Ling and Ring: queries, keys and values of one matrix, and a router in a module of its own."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, fused, grouped_attention, layer_of, swiglu
from shardmlx.models.mixture_blocks import expert_mlps, with_shared


def layers(config: Config) -> list[LayerShape]:
    """Return layers of which the first may be dense."""
    hidden, bias = config.count("hidden_size"), config.switch("use_bias", False)
    attention = grouped_attention(
        config,
        config.share("hidden_size", "num_attention_heads"),
        config.count("num_key_value_heads"),
        bias=config.switch("use_qkv_bias", False),
        output_bias=bias,
        norms="head" if config.switch("use_qk_norm", False) else "",
        norm_names=("query_layernorm", "key_layernorm"),
        path="attention",
        output="dense",
    )
    attention = fused(attention, name="query_key_value", path="attention")
    width = config.count("moe_intermediate_size")
    experts = expert_mlps(
        config,
        width,
        "num_experts",
        "num_experts_per_tok",
        bias=bias,
        router="gate.gate_proj",
        correction="gate.expert_bias"
        if config.switch("moe_router_enable_expert_bias", False)
        else "",
    )
    number = config.number("num_shared_experts", 0)
    if number and config.switch("moe_router_enable_shared_expert", True):
        each = config.number("moe_shared_expert_intermediate_size", 0) or width
        shared = swiglu(hidden, each * number, path="mlp.shared_experts", bias=bias)
        experts = with_shared(experts, shared)
    dense = swiglu(hidden, config.count("intermediate_size"), bias=bias)
    first = config.number("first_k_dense_replace", 0)
    return [
        layer_of(hidden, attention, experts if i >= first else dense)
        for i in range(config.count("num_hidden_layers"))
    ]


FAMILY = Family(
    layers=layers,
    tied=False,
    embedding="word_embeddings",
    stored_otherwise=r"\.mlp\.gate\.(weight|bias)$",
)
