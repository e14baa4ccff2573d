"""Texts of a dozen families, and of some special models, which ranks with tensor shares repeat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from shardmlx.inference.pipeline import FirstStage
from shardmlx.models.sizes.shares import TensorShares
from testbed.family_configs import CONFIGS
from testbed.tiny_models import build
from tests.helpers.generation import Texts, add_all, by_mlx_lm, texts_of

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "gemma2", "gemma3", "phi3"),
    *("glm4", "granite", "starcoder2"),
)
QUANTISED, NINE_HEADS = "llama in 4 bits", "llama with 9 heads"
WHOLE_EXPERTS = "mixtral with whole experts"
MODELS = (*FAMILIES, QUANTISED, WHOLE_EXPERTS, NINE_HEADS)

TOGETHER = {0: [3, 17, 5, 60, 22, 9, 41, 8, 30, 12, 7, 55], 1: [44, 2, 19, 71, 6]}
FEW, MANY = 4, 8
"""Tokens of the answers to prompts that are under way together, and to the one that goes on."""

_REPEATS = [11, 25, 70, 11, 25, 70, 11]

_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    QUANTISED: {"quantization": {"group_size": 32, "bits": 4}, "head_dim": 32},
    NINE_HEADS: {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
}


def config_of(model: str) -> dict[str, Any]:
    """Return the configuration, with heads and columns for up to four ranks, or three."""
    config = CONFIGS[model.partition(" ")[0]]
    inner = {"text_config": config["text_config"] | _SIZES} if "text_config" in config else _SIZES
    return {**config, **inner, **_SPECIAL.get(model, {})}


def shares_of(model: str, count: int) -> TensorShares:
    """Return equal shares of so many ranks, but 2:1 of nine heads on two."""
    weights = (2, 1) if (model, count) == (NINE_HEADS, 2) else (1,) * count
    return TensorShares(weights, 32 if model == QUANTISED else 1, model == WHOLE_EXPERTS)


def follow_up(answer: Sequence[int]) -> list[int]:
    """Return a prompt that begins with the first one and its answer, and then quotes itself."""
    return [*TOGETHER[0], *answer, *_REPEATS]


@cache
def expected_texts(model: str) -> list[list[int]]:
    """Return what mlx-lm says, in one process."""
    whole = build(config_of(model)).eval()
    texts = [by_mlx_lm(whole, prompt, FEW) for prompt in TOGETHER.values()]
    return [*texts, by_mlx_lm(whole, follow_up(texts[0]), MANY)]


def texts_in_turn(first_stage: FirstStage) -> tuple[list[list[int]], int]:
    """Return the same by stages, and how many tokens came from the prefix cache."""
    add_all(first_stage, TOGETHER, 64)
    texts: Texts = texts_of(first_stage, dict.fromkeys(TOGETHER, FEW))
    cached: dict[int, int] = {}
    last = len(TOGETHER)
    add_all(first_stage, {last: follow_up(texts[0])}, 64)
    texts |= texts_of(first_stage, {last: MANY}, cached)
    return [texts[number] for number in range(last + 1)], cached[last]
