"""Families of models, by ``model_type``: the rows of the table ``FAMILIES``. No MLX, no MPI.

A row says what differs from Llama's layers, and the few facts that tensors do not tell. A type
without a row is read from mlx-lm's own code (``models.undeclared``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from shardmlx.models.blocks import GATED_W, Experts, Grouped, latent
from shardmlx.models.family import Family, HeadNames
from shardmlx.models.layer_kinds import (
    routed_layers,
    stepped_layers,
    windows_by_period,
    windows_by_type,
)
from shardmlx.models.layer_shape import GELU_APPROX, Activation
from shardmlx.models.rope_parameters import FULL, WINDOWED

ANOTHER = "use a model of a type in docs/what-fits.md"
"""The remedy for a model that cannot run."""

BIASED = Grouped(bias="attention_bias")
HEAD_NORMS = Grouped(has_norms=True)
LLAMA = Family(attention=BIASED, mlp_bias="mlp_bias", windows=windows_by_type())
GEMMA2 = Family(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    activation=GELU_APPROX,
    # Probabilities, and the tanh of scores. mlx-lm ignores the windows of every other layer.
    scores=2,
    tied="always",
    takes_pieces=False,
    # mlx-lm mistakes the rows of a batch's mask for heads.
    takes_batches=False,
)

LOCAL = Experts(count="num_local_experts", width="intermediate_size")
ROUTED = Experts(count="n_routed_experts", shared="n_shared_experts", router_is_array=True)
CORRECTED = replace(ROUTED, is_corrected=True)
DEEPSEEK_V3 = Family(
    attention=latent,
    experts=CORRECTED,
    sparse=routed_layers,
    tied="never",
    # The layer after the last predicts one token more; scales of weights in fp8 are multiplied in.
    dropped=r"\bmodel\.layers\.61|weight_scale_inv",
    takes_pieces=False,
)
GLM4_MOE = Family(
    attention=Grouped(bias="attention_bias", output_bias=False, has_norms="use_qk_norm"),
    experts=CORRECTED,
    sparse=routed_layers,
    tied="never",
    drops_further_layers=True,
)

_FAMILIES = {
    **dict.fromkeys(("llama", "mistral"), LLAMA),
    "smollm3": Family(attention=BIASED, mlp_bias="mlp_bias"),
    "qwen2": Family(attention=Grouped(takes_head_dim=False, bias=True, output_bias=False)),
    "qwen3": Family(attention=HEAD_NORMS, tied="as said"),
    "ministral3": Family(
        windows=windows_by_type(),
        # Scales of weights in fp8, which mlx-lm multiplies in.
        dropped=r"activation_scale|weight_scale_inv",
    ),
    "gemma2": GEMMA2,
    "gemma3_text": Family(
        attention=HEAD_NORMS,
        windows=windows_by_period,
        norms=GEMMA2.norms,
        activation=GELU_APPROX,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "mixtral": Family(
        attention=Grouped(takes_head_dim=False),
        experts=replace(LOCAL, path="block_sparse_moe", names=GATED_W),
        tied="if said",
    ),
    "qwen3_moe": Family(
        attention=HEAD_NORMS,
        experts=Experts(count="num_experts"),
        sparse=stepped_layers,
        tied="as said",
    ),
    **dict.fromkeys(("deepseek_v3", "joyai_llm_flash", "kimi_k2"), DEEPSEEK_V3),
    **dict.fromkeys(("glm4_moe", "solar_open"), GLM4_MOE),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3, defaults={"first_k_dense_replace": 1}, dropped=None, drops_further_layers=True
    ),
    "mistral4": Family(
        attention=latent,
        experts=replace(ROUTED, router_is_array=False),
        sparse=routed_layers,
        tied="if said",
        # Scales of weights in fp8, which mlx-lm multiplies in.
        dropped=r"activation_scale$|_scale_inv$",
    ),
    # Every other layer has a window, and each head a sink.
    "gpt_oss": Family(
        attention=Grouped(bias=True),
        experts=replace(LOCAL, stack="experts", names=(), router="router", bias=True),
        windows=windows_by_type(WINDOWED, FULL),
        arrays={"self_attn.sinks": ("num_attention_heads",)},
        # Clipped gate and up, up again plus one, and the arrays of swiglu.
        activation=Activation(5, passing=3),
        # The sink's share of the scores.
        score_weights=1,
        tied="never",
        rounds_yarn=True,
    ),
    # Text models beside a vision tower, which mlx-lm ignores.
    "gemma3": Family(
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
        dropped=r"^vision_tower\.|^multi_modal_projector\.",
        windows=windows_by_period,
        text_default="gemma3_text",
        text_takes=("vocab_size",),
    ),
    "kimi_k25": Family(
        dropped=r"vision_tower|vision_model|mm_projector|multi_modal_projector",
        text_default="deepseek_v3",
    ),
    "mistral3": Family(
        tied="if said",
        dropped=r"vision_tower|multi_modal_projector",
        text_types=("ministral3", "mistral4"),
        text_default="llama",
        renames=(
            ("model.language_model.", "language_model.model."),
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
    ),
}
FAMILIES: Mapping[str, Family] = MappingProxyType(dict(sorted(_FAMILIES.items())))
"""The family of each ``model_type`` that a row declares."""

# vLLM's deepseek_mtp.py and glm4_moe_mtp.py, on states that its deepseek_v2.py has normed.
_NEXTN = HeadNames("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")

HEADS: Mapping[str, HeadNames] = MappingProxyType(
    {
        **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _NEXTN),
        # vLLM's mimo_mtp.py, on states that its mimo.py norms for the lm_head alone.
        "mimo": HeadNames(
            "model.mtp_layers.0.",
            "token_layernorm",
            "hidden_layernorm",
            "input_proj",
            "final_layernorm",
            states_first=True,
            after_norm=False,
        ),
    }
)
"""The heads for further tokens, by ``model_type``."""
