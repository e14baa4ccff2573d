"""Published dense models come out of their config.json with their published sizes.

The fields are those of the config.json on the hub that decide sizes. Vision towers are not counted,
as mlx-lm leaves them out.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardmlx.models.shape import ModelShape


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


TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}

MODELS: dict[str, tuple[float, dict[str, Any]]] = {
    "Llama-3.1-8B": (8.030261248, sizes(
        "llama", 4096, 32, 32, 8, 14336, 128256, **UNTIED, **NO_BIASES)),
    "Llama-3.2-1B": (1.235814400, sizes(
        "llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED, **NO_BIASES)),
    "Mistral-7B-v0.3": (7.248023552, sizes(
        "mistral", 4096, 32, 32, 8, 14336, 32768, **UNTIED)),
    "Mistral-Small-3.2-24B": (23.57, {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
        "text_config": sizes("mistral", 5120, 40, 32, 8, 32768, 131072, head_dim=128),
    }),
    "Qwen2.5-7B": (7.615616512, sizes(
        "qwen2", 3584, 28, 28, 4, 18944, 152064, **UNTIED)),
    "Qwen3-8B": (8.190735360, sizes(
        "qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128, **UNTIED)),
    "GLM-4-9B-0414": (9.40, sizes(
        "glm4", 4096, 40, 32, 2, 13696, 151552, head_dim=128, attention_bias=True, **UNTIED)),
    "glm-4-9b-chat-hf": (9.40, sizes(
        "glm", 4096, 40, 32, 2, 13696, 151552, head_dim=128, attention_bias=True, **UNTIED)),
    "OLMo-2-1124-7B": (7.30, sizes(
        "olmo2", 4096, 32, 32, 32, 11008, 100352, attention_bias=False, **UNTIED)),
    "OLMo-2-0425-1B": (1.48, sizes(
        "olmo2", 2048, 16, 16, 16, 8192, 100352, attention_bias=False, **UNTIED)),
    "Olmo-3-7B": (7.30, sizes(
        "olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096, **UNTIED)),
    "gemma-2b": (2.506172416, sizes("gemma", 2048, 18, 8, 1, 16384, 256000, head_dim=256)),
    "gemma-7b": (8.537680896, sizes("gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256)),
    "gemma-2-2b": (2.614341888, sizes("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256)),
    "gemma-2-9b": (9.241705984, sizes("gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256)),
    "gemma-2-27b": (27.227128320, sizes("gemma2", 4608, 46, 32, 16, 36864, 256000, head_dim=128)),
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
    "Phi-3-mini": (3.821079552, sizes("phi3", 3072, 32, 32, 32, 8192, 32064, **UNTIED)),
    "phi-4": (14.659507200, sizes("phi3", 5120, 40, 40, 10, 17920, 100352, **UNTIED)),
    "SmolLM3-3B": (3.075098624, sizes(
        "smollm3", 2048, 36, 16, 4, 11008, 128256, **TIED, **NO_BIASES)),
    "granite-3.3-8b": (8.17, sizes(
        "granite", 4096, 40, 32, 8, 12800, 49159, **TIED, **NO_BIASES)),
    "granite-3.3-2b": (2.53, sizes(
        "granite", 2048, 40, 32, 8, 8192, 49159, **TIED, **NO_BIASES)),
    "c4ai-command-r7b": (8.03, sizes(
        "cohere2", 4096, 32, 32, 8, 14336, 256000, head_dim=128, sliding_window=4096)),
    "c4ai-command-a": (111.0, sizes(
        "cohere2", 12288, 64, 96, 8, 36864, 256000, head_dim=128, sliding_window=4096)),
    "c4ai-command-r-v01": (35.0, sizes("cohere", 8192, 40, 64, 64, 22528, 256000)),
    "c4ai-command-r-plus": (104.0, sizes(
        "cohere", 12288, 64, 96, 8, 33792, 256000, use_qk_norm=True)),
    "EXAONE-4.0-32B": (32.0, sizes(
        "exaone4", 5120, 64, 40, 8, 27392, 102400, head_dim=128, sliding_window=4096,
        sliding_window_pattern="LLLG", **UNTIED)),
    "EXAONE-4.0-1.2B": (1.28, sizes(
        "exaone4", 2048, 30, 32, 8, 4096, 102400, head_dim=64, sliding_window=None,
        sliding_window_pattern=None, **TIED)),
    "Seed-OSS-36B": (36.151104512, sizes(
        "seed_oss", 5120, 64, 80, 8, 27648, 155136, head_dim=128, attention_bias=True, **UNTIED)),
    "ERNIE-4.5-0.3B": (0.36, sizes(
        "ernie4_5", 1024, 18, 16, 2, 3072, 103424, head_dim=128, use_bias=False, **TIED)),
    "Hunyuan-1.8B": (1.79, sizes(
        "hunyuan_v1_dense", 2048, 32, 16, 4, 6144, 120818, head_dim=128, use_qk_norm=True, **TIED)),
    "starcoder2-3b": (3.030371328, sizes("starcoder2", 3072, 30, 24, 2, 12288, 49152)),
    "starcoder2-7b": (7.173923840, sizes("starcoder2", 4608, 32, 36, 4, 18432, 49152)),
    "internlm2_5-7b": (7.737708544, sizes(
        "internlm2", 4096, 32, 32, 8, 14336, 92544, bias=False, **UNTIED)),
    "phi-2": (2.779683840, sizes("phi", 2560, 32, 32, 32, 10240, 51200)),
    "internlm3-8b": (8.80, sizes("internlm3", 4096, 48, 32, 2, 10240, 128512, **UNTIED)),
    "stablelm-2-1_6b": (1.644515328, sizes(
        "stablelm", 2048, 24, 32, 32, 5632, 100352, use_qkv_bias=True)),
    "stablelm-2-12b": (12.14, sizes(
        "stablelm", 5120, 40, 32, 8, 13824, 100352, use_qkv_bias=False, use_parallel_residual=True,
        qk_layernorm=True)),
    "Apertus-8B": (8.05, sizes("apertus", 4096, 32, 32, 8, 21504, 131072, **NO_BIASES, **UNTIED)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_its_published_parameters(name: str) -> None:
    billions, config = MODELS[name]
    assert ModelShape.from_config(config).parameters() / 1e9 == pytest.approx(billions, rel=0.01)
