"""The self-test of ``shardmlx doctor``: a device's losses and gradients beside those of the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shardmlx.engine.batches import make_batch, split
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.runtime.tuner import linear_to_lora_layers
from shardmlx.models.sizes.undeclared import build_random

_LAYERS = 2
_VOCABULARY = 96
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": _LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA = {"model_type": "llama", **_SIZES}
_WINDOW = {"query_pre_attn_scalar": 64, "sliding_window": 8, "sliding_window_pattern": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": _LAYERS,
}
_CONVOLUTION = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}

KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "attention": _LLAMA,
        "4 bits": {**_LLAMA, "quantization": {"group_size": 32, "bits": 4}},
        "sliding window": {"model_type": "gemma3_text", **_SIZES, **_WINDOW},
        "experts": {"model_type": "mixtral", **_SIZES, **_EXPERTS},
        "gated delta rule": {
            "model_type": "qwen3_5",
            "text_config": {**_SIZES, **_GATED_DELTA, "model_type": "qwen3_5_text"},
        },
        "short convolution": {"model_type": "lfm2", **_SIZES, **_CONVOLUTION},
    }
)
"""Kinds of layers, each with the config.json of a model of mlx-lm that has it."""


def differences() -> dict[str, float]:
    """Return by kind how far the default device is from the CPU: the largest difference of a loss
    or gradient, relative to the largest entry of its array; NaN where one is not finite."""
    return {kind: _difference(config) for kind, config in KINDS.items()}


def _difference(config: Mapping[str, Any]) -> float:
    with mx.stream(mx.cpu):
        model = _model(config)
        expected = _loss_and_gradients(model)
    found = _loss_and_gradients(model)
    return float(np.max([_apart(found[name], array) for name, array in expected.items()]))


def _apart(found: np.ndarray, expected: np.ndarray) -> float:
    largest = np.abs(expected).max()
    return float(np.abs(found - expected).max() / largest) if largest > 0 else float(found.any())


def _model(config: Mapping[str, Any]) -> nn.Module:
    mx.random.seed(0)
    model = build_random(config)
    if "quantization" in config:
        nn.quantize(model, **config["quantization"])
        model.freeze()
        linear_to_lora_layers(model, _LAYERS, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    mx.eval(model.parameters())
    return model


def _loss_and_gradients(model: nn.Module) -> dict[str, np.ndarray]:
    tokens = [
        [1 + (7 * row + place**2) % (_VOCABULARY - 1) for place in range(40)] for row in (0, 1)
    ]
    batch = make_batch([(each, 0) for each in tokens], max_seq_length=len(tokens[0]))
    (microbatch,) = split(batch, dp=1, replica=0, micro_batch_rows=len(tokens))
    (stage,) = build_stages([Slice(model, 0, _LAYERS)])
    loss = stage.forward(0, microbatch, None, scale=1.0)
    stage.backward_weight(0)
    gradients = {name: np.array(array) for name, array in stage.gradients.items()}
    return {"loss": np.array(loss), **gradients}
