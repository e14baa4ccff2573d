"""A Mixtral as Hugging Face stores it: a tensor for each matrix of each expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from testbed.tiny_models import build

_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def single_experts(name: str, count: int) -> list[str]:
    """Return the names of all experts' parts of a stacked tensor; empty for another tensor."""
    path, _, part = name.partition(".switch_mlp.")
    own = _NAMES.get(part.partition(".")[0])
    return [f"{path}.experts.{expert}.{own}.weight" for expert in range(count if part else 0)]


def save_experts_one_by_one(directory: Path, config: dict[str, Any]) -> Path:
    """Write a random model, in two files that each have a part of every layer; return where."""
    parts: dict[str, mx.array] = {}
    for name, array in tree_flatten(build(config).parameters()):
        single = single_experts(name, array.shape[0])
        parts |= dict(zip(single, array, strict=True)) if single else {name: array}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    halves = list(parts.items())
    for number, half in enumerate((halves[::2], halves[1::2]), 1):
        mx.save_safetensors(str(directory / f"model-0000{number}-of-00002.safetensors"), dict(half))
    return directory
