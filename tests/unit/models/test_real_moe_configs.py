"""Published mixtures of experts come out of their config.json with their published sizes.

The fields are those of the config.json on the hub that decide sizes; further layers, which predict
more tokens, are not among them, as mlx-lm leaves them out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from shardmlx.models.shape import ModelShape

QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
GLM = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
GRANITE = {
    "model_type": "granitemoe",
    "vocab_size": 49155,
    "intermediate_size": 512,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


class Published(NamedTuple):
    """Sizes of a model in billions of parameters.

    Of what is active some count no embedding, of which a token reads one row, and some no lm_head
    either: ``uncounted`` of these matrices. ``active`` is None where what is counted is not clear.
    """

    total: float
    active: float | None
    uncounted: int
    config: dict[str, Any]


def sides(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}


def routed(first: int, experts: int, width: int, dense: int) -> dict[str, Any]:
    return {
        "first_k_dense_replace": first,
        "n_routed_experts": experts,
        "moe_intermediate_size": width,
        "intermediate_size": dense,
    }


MODELS = {
    "Qwen3-30B-A3B": Published(30.532122624, 3.3, 0, {
        **QWEN3, **sides(2048, 48, 32), "intermediate_size": 6144, "moe_intermediate_size": 768,
    }),
    "Qwen3-235B-A22B": Published(235.093634560, 22, 0, {
        **QWEN3, **sides(4096, 94, 64), "intermediate_size": 12288, "moe_intermediate_size": 1536,
    }),
    "Qwen1.5-MoE-A2.7B": Published(14.315784192, 2.7, 0, {
        **sides(2048, 24, 16), "model_type": "qwen2_moe", "vocab_size": 151936,
        "intermediate_size": 5632, "num_key_value_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }),
    "gpt-oss-20b": Published(20.91, 3.61, 1, {
        **GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32,
    }),
    "gpt-oss-120b": Published(116.83, 5.13, 1, {
        **GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128,
    }),
    "DeepSeek-V2-Lite": Published(15.706484224, None, 0, {
        **LATENT, **sides(2048, 27, 16), **routed(1, 64, 1408, 10944), "q_lora_rank": None,
        "model_type": "deepseek_v2", "vocab_size": 102400, "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    }),
    "DeepSeek-V2": Published(236, 21, 1, {
        **LATENT, **sides(5120, 60, 128), **routed(1, 160, 1536, 12288),
        "model_type": "deepseek_v2", "vocab_size": 102400, "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    }),
    "DeepSeek-V3": Published(671, 37, 1, {
        **LATENT, **sides(7168, 61, 128), **routed(3, 256, 2048, 18432),
        "model_type": "deepseek_v3", "vocab_size": 129280, "n_shared_experts": 1,
        "num_experts_per_tok": 8,
    }),
    # 675 and 41 with the vision encoder, which mlx-lm passes over.
    "Mistral-Large-3": Published(673, 39, 1, {
        "model_type": "mistral3",
        "text_config": {
            **LATENT, **sides(7168, 61, 128), **routed(3, 128, 4096, 16384),
            "model_type": "mistral4", "vocab_size": 131072, "n_shared_experts": 1,
            "num_experts_per_tok": 4,
        },
    }),
    "Moonlight-16B-A3B": Published(16, 2.24, 2, {
        **LATENT, **sides(2048, 27, 16), **routed(1, 64, 1408, 11264), "q_lora_rank": None,
        "model_type": "deepseek_v3", "vocab_size": 163840, "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    }),
    "Kimi-K2": Published(1040, 32.6, 0, {
        **LATENT, **sides(7168, 61, 64), **routed(1, 384, 2048, 18432),
        "model_type": "kimi_k2", "vocab_size": 163840, "n_shared_experts": 1,
        "num_experts_per_tok": 8,
    }),
    "GLM-4.5": Published(355, 32, 2, {
        **GLM, **sides(5120, 92, 96), **routed(3, 160, 1536, 12288), "use_qk_norm": True,
    }),
    "GLM-4.5-Air": Published(106, 12, 2, {
        **GLM, **sides(4096, 46, 96), **routed(1, 128, 1408, 10944), "use_qk_norm": False,
    }),
    "dots.llm1": Published(142, 14, 0, {
        **sides(4096, 62, 32), **routed(1, 128, 1408, 10944), "model_type": "dots1",
        "vocab_size": 152064, "num_key_value_heads": 32, "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    }),
    "MiniMax-M2": Published(230, None, 0, {
        **sides(3072, 62, 48), "model_type": "minimax_m2", "vocab_size": 200064,
        "intermediate_size": 1536, "head_dim": 128, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_experts_per_tok": 8,
    }),
    "OLMoE-1B-7B": Published(6.919161856, 1.3, 0, {
        **sides(2048, 16, 16), "model_type": "olmoe", "vocab_size": 50304,
        "intermediate_size": 1024, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "tie_word_embeddings": False,
    }),
    "Mixtral-8x7B": Published(46.702792704, 12.9, 0, {
        **MIXTRAL, **sides(4096, 32, 32), "vocab_size": 32000, "intermediate_size": 14336,
    }),
    "Mixtral-8x22B": Published(140.6, 39, 0, {
        **MIXTRAL, **sides(6144, 56, 48), "vocab_size": 32768, "intermediate_size": 16384,
    }),
    "Phi-3.5-MoE": Published(41.9, 6.6, 0, {
        **sides(4096, 32, 32), "model_type": "phimoe", "vocab_size": 32064,
        "intermediate_size": 6400, "num_key_value_heads": 8, "num_local_experts": 16,
        "num_experts_per_tok": 2,
    }),
    "Ling-lite": Published(16.8, 2.75, 0, {
        **sides(2048, 28, 16), "model_type": "bailing_moe", "vocab_size": 126464,
        "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_key_value_heads": 4,
        "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
        "first_k_dense_replace": 0,
    }),
    "granite-3.0-1b-a400m": Published(1.334628352, None, 0, {
        **GRANITE, **sides(1024, 24, 16), "num_local_experts": 32,
    }),
    "granite-3.0-3b-a800m": Published(3.3, 0.8, 1, {
        **GRANITE, **sides(1536, 32, 24), "num_local_experts": 40,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_its_published_parameters(name: str) -> None:
    total, active, uncounted, config = MODELS[name]
    shape = ModelShape.from_config(config)
    # Published with all digits where the hub counts the tensors.
    exact = len(str(total)) > 8
    assert shape.parameters() / 1e9 == pytest.approx(total, rel=1e-9 if exact else 0.015)
    if active is not None:
        counted = shape.active_parameters() - uncounted * shape.embedding_parameters()
        assert counted / 1e9 == pytest.approx(active, rel=0.02)


def test_a_latent_cache_is_small_and_keeps_what_mlx_lm_keeps() -> None:
    """Elements of a token in a layer: of one latent state, or of keys and values of all heads."""
    latent = ModelShape.from_config(MODELS["DeepSeek-V3"].config).layer(0).heads
    assert latent.cached == 512 + 64
    whole = ModelShape.from_config(MODELS["DeepSeek-V2"].config).layer(0).heads
    assert whole.cached == 128 * (128 + 64 + 128)
