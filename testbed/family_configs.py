"""A tiny config.json of every family: what makes it differ from the others is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from testbed.tiny_models import VOCABULARY, tiny_config

LAYERS = 4

BASE = {key: value for key, value in tiny_config(layers=LAYERS).items() if key != "model_type"}

KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
# First a dense layer, then experts in two groups, of which one group is used.
ROUTED: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT_AND_ROUTED: dict[str, Any] = {**LATENT, **ROUTED, "rope_scaling": YARN}

_OWN: dict[str, dict[str, Any]] = {
    "glm4": {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 8, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 20.0,
        # So low that both bend what they cap.
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 256,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "phi3": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "granite": {
        "attention_bias": True,
        "mlp_bias": True,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.02,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "tie_word_embeddings": True,
    },
    "cohere2": {
        "head_dim": 8,
        "attention_bias": True,
        "logit_scale": 0.25,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "exaone4": {
        "head_dim": 16,
        "rope_scaling": None,
        "sliding_window": 8,
        "sliding_window_pattern": "LLG",
    },
    "seed_oss": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "attention_bias": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "cohere": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "starcoder2": {"norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "internlm3": {
        "bias": True,
        "qkv_bias": True,
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "mimo": {"num_nextn_predict_layers": 1},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "mlp_bias": True},
    "stablelm": {
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.25,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "qk_layernorm": True,
    },
    "apertus": {"mlp_bias": True, "attention_bias": False, "post_norm": False, "qk_norm": True},
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 12.0},
    "telechat3": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "internlm2": {"bias": True},
    "helium": {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 96},
    "gpt_oss": {
        **LOCAL_EXPERTS,
        "head_dim": 16,
        "sliding_window": 8,
        "rope_scaling": {**YARN, "rope_type": "yarn", "truncate": False},
    },
    "deepseek_v2": {
        **LATENT_AND_ROUTED,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "attention_bias": True,
    },
    "deepseek_v3": {**LATENT_AND_ROUTED, "moe_layer_freq": 2},
    "kimi_k2": {**LATENT_AND_ROUTED, "n_group": 1, "n_shared_experts": 1},
    "joyai_llm_flash": {**LATENT_AND_ROUTED, "q_lora_rank": None},
    "mistral4": {
        **LATENT_AND_ROUTED,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
    },
    "glm4_moe": {
        **ROUTED,
        "head_dim": 16,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe_lite": {**LATENT_AND_ROUTED, "rope_scaling": None},
    "dots1": {**ROUTED, "head_dim": 16},
    "minimax": {**LOCAL_EXPERTS, "head_dim": 16, "rotary_dim": 8, "shared_intermediate_size": 0},
    "minimax_m2": {
        **LOCAL_EXPERTS,
        "rotary_dim": 4,
        "shared_intermediate_size": 0,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
    },
    "olmoe": {**EXPERTS, "attention_bias": True, "mlp_bias": True},
    "granitemoe": {
        **LOCAL_EXPERTS,
        "attention_bias": True,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0, 1, 0],
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        "use_bias": True,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": [1, 2],
        "moe_layer_end_index": [2, 2],
    },
    "exaone_moe": {
        **EXPERTS,
        "head_dim": 16,
        "num_shared_experts": 1,
        "sliding_window": 8,
        "layer_types": KINDS,
        "is_moe_layer": [False, True, True, True],
    },
    "deepseek": {**ROUTED, "attention_bias": True},
    "solar_open": {**ROUTED, "head_dim": 16, "partial_rotary_factor": 1.0},
    "phimoe": {**LOCAL_EXPERTS, "rope_scaling": None, "router_jitter_noise": 0.2},
    "bailing_moe": {
        **EXPERTS,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_bias": True,
        "use_qkv_bias": True,
        "use_qk_norm": True,
        "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
    },
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", layers=LAYERS, layer_types=KINDS, sliding_window=8),
    "mistral": tiny_config("mistral", layers=LAYERS),
    "ministral3": tiny_config("ministral3", layers=LAYERS, layer_types=KINDS, sliding_window=8),
    "mixtral": tiny_config("mixtral", layers=LAYERS),
    "qwen2": tiny_config("qwen2", layers=LAYERS, tied=True),
    "qwen3": tiny_config("qwen3", layers=LAYERS),
    "mistral3": {
        "model_type": "mistral3",
        "text_config": BASE
        | {"model_type": "mistral", "head_dim": 16, "layer_types": KINDS, "sliding_window": 8},
        "vision_config": {"hidden_size": 48},
    },
    "gemma3": {
        "model_type": "gemma3",
        "vocab_size": VOCABULARY + 2,
        "text_config": BASE
        | {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "num_attention_heads": 4,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
        },
    },
    "kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": {**BASE, **LATENT_AND_ROUTED, "model_type": "kimi_k2"},
    },
    **{family: {"model_type": family, **BASE, **own} for family, own in _OWN.items()},
}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a tiny config has experts, without a look at its model, which would take each
    collection of the tests two seconds."""
    return "experts" in json.dumps(config)
