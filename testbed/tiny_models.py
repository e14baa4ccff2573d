"""Tiny models with random weights, of any family of mlx-lm."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from shardmlx.modelfiles.tensors import is_dropped
from shardmlx.models.families import is_declared
from shardmlx.models.sizes.shape import ModelShape

VOCABULARY = 97

_ROPE = {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
_OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "ministral3": {"rope_parameters": {"rope_type": "default", "type": "default", **_ROPE}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 16},
}


def tiny_config(
    family: str = "llama", *, layers: int = 8, tied: bool = False, **overrides: Any
) -> dict[str, Any]:
    """Return what config.json would say of a tiny model of that family."""
    return {
        "model_type": family,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        **_OF_FAMILY.get(family, {}),
        **overrides,
    }


def build(config: Mapping[str, Any], seed: int = 1) -> nn.Module:
    """mlx-lm's model of a configuration, quantised if that says so, with random weights."""
    kind, args = _get_classes(dict(config))
    mx.random.seed(seed)
    model: nn.Module = kind(args.from_dict(deepcopy(dict(config))))
    if hasattr(model, "sanitize") and is_declared(config):
        # Of some families mlx-lm looks at the tensors to know whether there is an lm_head.
        shape, weights = ModelShape.from_config(config), tree_flatten(model.parameters())
        kept = {name: array for name, array in weights if not is_dropped(name, shape)}
        assert set(model.sanitize(dict(kept))) == set(kept)
    if (quantisation := config.get("quantization")) is not None:
        nn.quantize(model, **quantisation)
    mx.eval(model.parameters())
    return model


def save_model_directory(
    path: Path, config: Mapping[str, Any], seed: int = 1, *, copies: bool = False
) -> Path:
    """Write a model with random weights where mlx-lm loads it from; return the directory.

    With ``copies`` all layers have the weights of the first.
    """
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(build(config, seed).parameters()))
    if copies:
        first = {name: re.sub(r"\.layers\.\d+\.", ".layers.0.", name) for name in weights}
        weights = {name: weights[first[name]] for name in weights}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(dict(config)))
    return path
