"""A tiny config.json of models of mlx-lm that no row of ``models.families`` declares."""

from __future__ import annotations

from typing import Any

from testbed.family_configs import BASE, EXPERTS, LAYERS
from testbed.tiny_models import VOCABULARY

GPT: dict[str, Any] = {
    "n_ctx": 128,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_positions": 64,
    "n_inner": 64,
    "rotary_dim": 4,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCABULARY,
}
_MAMBA: dict[str, Any] = {
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "time_step_limit": [0.001, 100.0],
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 1,
    "layer_norm_epsilon": 1e-5,
}
_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

LINEAR_ATTENTION = {
    "full_attn_layers": [2, 4],
    "kda_layers": [1, 3],
    "num_heads": 2,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_GEMMA4: dict[str, Any] = {
    **BASE,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}

ATTENTIVE: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_neox": {**BASE, "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "openelm": {
        "head_dim": 8,
        "num_transformer_layers": LAYERS,
        "model_dim": 32,
        "vocab_size": VOCABULARY,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.5],
    },
    "llama4": {
        "text_config": {
            **BASE,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 16,
            "head_dim": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "gemma4_text": {**_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    "gemma4": {
        "vocab_size": VOCABULARY,
        "text_config": {
            **_GEMMA4,
            "model_type": "gemma4_text",
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    },
}
"""Models of attention."""

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {**BASE, **_MAMBA, "intermediate_size": 64},
    "falcon_h1": {**BASE, **_HEADS, "head_dim": 16, "mamba_d_ssm": 64},
    "qwen3_next": {
        **BASE,
        **EXPERTS,
        **_DELTA,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "head_dim": 16,
        "full_attention_interval": 2,
    },
    "qwen3_5": {
        "text_config": {
            **BASE,
            **_DELTA,
            "model_type": "qwen3_5_text",
            "head_dim": 16,
            "full_attention_interval": 2,
        }
    },
    "qwen3_5_moe": {
        "text_config": {
            **BASE,
            **EXPERTS,
            **_DELTA,
            "model_type": "qwen3_5_moe_text",
            "head_dim": 16,
            "full_attention_interval": 2,
            "shared_expert_intermediate_size": 32,
        }
    },
    "olmo_hybrid": {
        **BASE,
        **_DELTA,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "kimi_linear": {
        **BASE,
        "head_dim": 16,
        "linear_attn_config": LINEAR_ATTENTION,
        "model_max_length": 512,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "lfm2_moe": {
        **BASE,
        **EXPERTS,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1, 3],
    },
    "plamo2": {
        **BASE,
        "hidden_size_per_head": 8,
        "attention_window_size": 8,
        "full_attention_idx": [3],
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
    },
    "lfm2": {
        **BASE,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "nemotron_h": {
        **BASE,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "head_dim": 16,
        "time_step_limit": [0.001, 100.0],
    },
    "granitemoehybrid": {
        **BASE,
        **_HEADS,
        "attention_bias": False,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_proj_bias": False,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
}
"""Models whose layers keep a state of fixed size, alone or beside attention."""

LOOPING: dict[str, dict[str, Any]] = {
    "mamba": {**BASE, **_MAMBA},
    "jamba": {
        **BASE,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "recurrent_gemma": {
        **BASE,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
}
"""The same, where mlx-lm computes these layers in a loop over tokens: they are not trained."""

REFUSED: dict[str, dict[str, Any]] = {
    "talkie": {**BASE},
    "nanbeige": {**BASE, "num_loops": 2},
    "iquestloopcoder": {**BASE, "loop_num": 2, "loop_window_size": 8, "head_dim": 8},
}
"""Models whose layers pass on more than hidden states."""

UNDECLARED: dict[str, dict[str, Any]] = {
    name: {"model_type": name, **config}
    for name, config in {**ATTENTIVE, **RECURRENT, **LOOPING, **REFUSED}.items()
}
