"""Published models come out of their config.json with their published sizes.

The fields are those of the config.json on the hub that decide sizes. Vision towers, and layers that
predict more tokens, are not counted, as mlx-lm leaves them out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from shardmlx.modelfiles.parts import planned_tensors, read_shape


def sizes(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    groups: int,
    width: int,
    vocabulary: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        **others,
    }


UNTIED = {"tie_word_embeddings": False}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}

DENSE: dict[str, tuple[float, dict[str, Any]]] = {
    "Llama-3.1-8B": (8.030261248, sizes(
        "llama", 4096, 32, 32, 8, 14336, 128256, **UNTIED, **NO_BIASES)),
    "Mistral-Small-3.2-24B": (23.57, {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
        "text_config": sizes(
            "mistral", 5120, 40, 32, 8, 32768, 131072, head_dim=128, rms_norm_eps=1e-5),
    }),
    "Qwen3-8B": (8.190735360, sizes(
        "qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128, **UNTIED)),
    "gemma-7b": (8.537680896, sizes(
        "gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256, rms_norm_eps=1e-6)),
    "gemma-2-2b": (2.614341888, sizes("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256)),
    "gemma-3-1b": (0.999885952, sizes(
        "gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256, sliding_window=512)),
    "gemma-3-4b": (3.88, {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }),
    "c4ai-command-r7b": (8.03, sizes(
        "cohere2", 4096, 32, 32, 8, 14336, 256000, head_dim=128, sliding_window=4096)),
    "c4ai-command-r-plus": (104.0, sizes(
        "cohere", 12288, 64, 96, 8, 33792, 256000, use_qk_norm=True)),
    "starcoder2-7b": (7.173923840, sizes("starcoder2", 4608, 32, 36, 4, 18432, 49152)),
    "phi-2": (2.779683840, sizes("phi", 2560, 32, 32, 32, 10240, 51200)),
    "stablelm-2-12b": (12.14, sizes(
        "stablelm", 5120, 40, 32, 8, 13824, 100352, use_qkv_bias=False, use_parallel_residual=True,
        qk_layernorm=True, rope_theta=10000, partial_rotary_factor=0.25, layer_norm_eps=1e-5)),
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128, "num_experts_per_tok": 8,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "sliding_window": 128,
}  # fmt: skip
ROUTING = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "moe_layer_freq": 1,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "vocab_size": 151552, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "rope_theta": 1e6, "rope_scaling": None,
    "partial_rotary_factor": 0.5, "tie_word_embeddings": False, **ROUTING,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip


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


MIXTURES = {
    "Qwen3-30B-A3B": Published(30.532122624, 3.3, 0, {
        **QWEN3, **sides(2048, 48, 32), "intermediate_size": 6144, "moe_intermediate_size": 768,
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
        "num_experts_per_tok": 6, "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
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
            **LATENT, **ROUTING, **sides(7168, 61, 128), **routed(3, 128, 4096, 16384),
            "model_type": "mistral4", "vocab_size": 131072, "n_shared_experts": 1,
            "num_experts_per_tok": 4, "num_key_value_heads": 128, "rope_parameters": {
                "type": "yarn", "factor": 36.0, "original_max_position_embeddings": 8192,
                "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.1,
            },
        },
    }),
    "Kimi-K2": Published(1040, 32.6, 0, {
        **LATENT, **sides(7168, 61, 64), **routed(1, 384, 2048, 18432),
        "model_type": "kimi_k2", "vocab_size": 163840, "n_shared_experts": 1,
        "num_experts_per_tok": 8,
    }),
    "GLM-4.5": Published(355, 32, 2, {
        **GLM, **sides(5120, 92, 96), **routed(3, 160, 1536, 12288), "use_qk_norm": True,
    }),
    "Mixtral-8x7B": Published(46.702792704, 12.9, 0, {
        **MIXTRAL, **sides(4096, 32, 32), "vocab_size": 32000, "intermediate_size": 14336,
    }),
    "Ling-lite": Published(16.8, 2.75, 0, {
        **sides(2048, 28, 16), "model_type": "bailing_moe", "vocab_size": 126464,
        "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_key_value_heads": 4,
        "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
        "first_k_dense_replace": 0, "max_position_embeddings": 16384, "norm_topk_prob": True,
        "rms_norm_eps": 1e-6, "rope_theta": 600000,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_has_its_published_parameters(name: str) -> None:
    billions, config = DENSE[name]
    assert read_shape(config).parameters() / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_its_published_parameters(name: str) -> None:
    total, active, uncounted, config = MIXTURES[name]
    shape = read_shape(config)
    # Published with all digits where the hub counts the tensors.
    exact = len(str(total)) > 8
    assert shape.parameters() / 1e9 == pytest.approx(total, rel=1e-9 if exact else 0.015)
    if active is not None:
        counted = shape.active_parameters() - uncounted * shape.vocab_size * shape.hidden_size
        assert counted / 1e9 == pytest.approx(active, rel=0.02)


def test_a_latent_cache_is_small_and_keeps_what_mlx_lm_keeps() -> None:
    """Elements of a token in a layer: of one latent state, or of keys and values of all heads."""
    latent = read_shape(MIXTURES["DeepSeek-V3"].config).layer(0).heads
    assert latent.cached == 512 + 64
    whole = read_shape(MIXTURES["DeepSeek-V2-Lite"].config).layer(0).heads
    assert whole.cached == 16 * (128 + 64 + 128)


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_bytes_of_gpt_oss_are_those_of_its_files(name: str, gib: float) -> None:
    layers = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    kept = [*layers, "model.embed_tokens", "lm_head"]
    packing = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    tensors = planned_tensors(MIXTURES[name].config | {"quantization_config": packing})
    assert sum(each.nbytes for each in tensors.values()) / 2**30 == pytest.approx(gib, abs=0.05)
