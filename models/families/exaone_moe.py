"""K-EXAONE: some layers see a window, some have experts; the router chooses by corrected scores."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, layer_of, swiglu, windows
from shardmlx.models.mixture_blocks import expert_mlps, with_shared


def layers(config: Config) -> list[LayerShape]:
    """Return layers that differ in their window, and in having experts."""
    hidden, width = config.count("hidden_size"), config.count("moe_intermediate_size")
    attention = grouped_attention(
        config, config.count("head_dim"), config.count("num_key_value_heads"), norms="head"
    )
    experts = expert_mlps(
        config,
        width,
        "num_experts",
        "num_experts_per_tok",
        router_is_array=True,
        correction="gate.e_score_correction_bias",
    )
    if shared := config.number("num_shared_experts", 0):
        experts = with_shared(experts, swiglu(hidden, width * shared, path="mlp.shared_experts"))
    dense = swiglu(hidden, config.count("intermediate_size"))
    has_experts = config.each_layer("is_moe_layer") or []
    return [
        layer_of(hidden, attention, experts if sparse else dense, window=window)
        for sparse, window in zip(has_experts, windows(config), strict=True)
    ]


FAMILY = Family(
    layers=layers,
    tied=False,
    dropped=r"^mtp\.",
    chooses_caches=True,
    stored_otherwise=r"\.mlp\.e_score_correction_bias",
)
