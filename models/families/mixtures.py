"""Families with layers of experts, of which each token passes some."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.models.blocks import GATED_W, Experts, Grouped, Latent
from shardmlx.models.family import Family
from shardmlx.models.layer_kinds import (
    routed_layers,
    stepped_layers,
    windows_by_type,
)
from shardmlx.models.layer_shape import Activation
from shardmlx.models.rope_parameters import FULL, WINDOWED

EXPERTS = Experts(count="num_experts")
LOCAL = Experts(
    count="num_local_experts", width="intermediate_size", path="block_sparse_moe", names=GATED_W
)
ROUTED = Experts(count="n_routed_experts", shared="n_shared_experts", router_is_array=True)
CORRECTED = replace(ROUTED, correction="gate.e_score_correction_bias")

DEEPSEEK_V3 = Family(
    attention=Latent(),
    experts=CORRECTED,
    sparse=routed_layers,
    tied="never",
    # The layer after the last predicts one token more; scales of weights in fp8 are multiplied in.
    dropped=r"\bmodel\.layers\.61|weight_scale_inv",
    takes_pieces=False,
    stored_otherwise=r"\.kv_b_proj\.",
)
GLM4_MOE = Family(
    attention=Grouped(
        bias="attention_bias", output_bias=False, norms="head", has_norms="use_qk_norm"
    ),
    experts=CORRECTED,
    sparse=routed_layers,
    tied="never",
    drops_further_layers=True,
)
MINIMAX = Family(
    attention=Grouped(norms="whole", has_norms="use_qk_norm"),
    experts=replace(LOCAL, correction="e_score_correction_bias"),
    defaults={"use_qk_norm": True},
    tied="if said",
    dropped="weight_scale_inv",
)

FAMILIES = {
    "mixtral": Family(attention=Grouped(head_dim=""), experts=LOCAL, tied="if said", has_gguf=True),
    "deepseek_v2": Family(
        attention=Latent(absorbed=False), experts=ROUTED, sparse=routed_layers, tied="never"
    ),
    **dict.fromkeys(("deepseek_v3", "joyai_llm_flash", "kimi_k2"), DEEPSEEK_V3),
    **dict.fromkeys(("glm4_moe", "solar_open"), GLM4_MOE),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3, defaults={"first_k_dense_replace": 1}, dropped=None, drops_further_layers=True
    ),
    # Every other layer has a window, and each head a sink.
    "gpt_oss": Family(
        attention=Grouped(bias=True),
        experts=Experts(
            count="num_local_experts",
            width="intermediate_size",
            stack="experts",
            names=(),
            bias=True,
            router="router",
            router_bias=True,
        ),
        windows=windows_by_type(WINDOWED, FULL),
        arrays={"self_attn.sinks": ("num_attention_heads",)},
        # Clipped gate and up, up again plus one, and the arrays of swiglu.
        activation=Activation(5, passing=3),
        # The sink's share of the scores.
        score_weights=1,
        tied="never",
        rounds_yarn=True,
        stored_otherwise=r"\.experts\.gate_up_proj",
    ),
    "granitemoe": Family(
        attention=Grouped(head_dim="", bias="attention_bias"),
        experts=replace(LOCAL, names=(), router="router.layer"),
        stored_otherwise=r"\.block_sparse_moe\.input_linear\.",
    ),
    **dict.fromkeys(("minimax", "minimax_m2"), MINIMAX),
    "mistral4": Family(
        attention=Latent(),
        experts=replace(ROUTED, router_is_array=False),
        sparse=routed_layers,
        tied="if said",
        # Scales of weights in fp8, which mlx-lm multiplies in.
        dropped=r"activation_scale$|_scale_inv$",
        stored_otherwise=r"\.kv_b_proj\.",
    ),
    "qwen2_moe": Family(
        attention=Grouped(head_dim="", bias=True, output_bias=False),
        experts=replace(
            EXPERTS,
            shared_path="shared_expert",
            shared_width="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        tied="never",
    ),
    "qwen3_moe": Family(
        attention=Grouped(norms="head"), experts=EXPERTS, sparse=stepped_layers, tied="as said"
    ),
}
