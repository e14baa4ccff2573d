"""Families of models, by ``model_type``: the rows of the table ``FAMILIES``. No MLX, no MPI.

A row says what differs from Llama's layers, and the few facts that tensors do not tell. A type
without a row is read from mlx-lm's own code (``models.sizes.undeclared``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardmlx.models.family import Family, HeadNames
from shardmlx.models.sizes.layer_kinds import windows_by_period, windows_by_type
from shardmlx.models.sizes.layer_shape import GELU_APPROX

ANOTHER = "use a model of a type in docs/what-fits.md"
"""The remedy for a model that cannot run."""

LLAMA = Family(bias="attention_bias", mlp_bias="mlp_bias", windows=windows_by_type)
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

_FAMILIES = {
    **dict.fromkeys(("llama", "mistral"), LLAMA),
    "smollm3": Family(bias="attention_bias", mlp_bias="mlp_bias"),
    "qwen2": Family(takes_head_dim=False, bias=True, output_bias=False),
    "qwen3": Family(norms_heads=True, tied="as said"),
    "gemma2": GEMMA2,
    "gemma3_text": Family(
        norms_heads=True,
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
    # A text model beside a vision tower, which mlx-lm ignores.
    "gemma3": Family(
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
        windows=windows_by_period,
        text_type="gemma3_text",
        text_takes=("vocab_size",),
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


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether a row declares the model of a config.json."""
    return str(config.get("model_type")) in FAMILIES
