"""Adapters as mlx-lm saves them, and what an earlier run has written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from shardmlx.modelfiles.safetensors_header import INDEX_FILE
from tests.helpers.models_and_batches import move_trained, with_adapters


def save_lora(
    directory: Path,
    weights: Mapping[str, mx.array],
    layers: int,
    parameters: Any,
    kind: str = "lora",
) -> Path:
    """Save adapters of the last ``layers`` as ``mlx_lm.lora`` does; return the directory."""
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), dict(weights))
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def save_random_lora(
    directory: Path, model_dir: Path, layers: int, *, dora: bool = False, **parameters: Any
) -> Path:
    """Save adapters of a model's last ``layers``, of rank 4 where ``parameters`` say no other."""
    model, _ = load_model(model_dir, lazy=True)
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, **parameters}
    move_trained(with_adapters(model, layers, dora=dora, **parameters), 0.1)
    weights = dict(tree_flatten(model.trainable_parameters()))
    return save_lora(directory, weights, layers, parameters, "dora" if dora else "lora")


def write_earlier_outputs(folder: Path, content: bytes) -> None:
    """Make ``folder`` with what an earlier run wrote: adapters, and a whole model in one shard."""
    folder.mkdir()
    shard = "model-00001-of-00001.safetensors"
    for name in ("adapters.safetensors", shard):
        (folder / name).write_bytes(content)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"weight": shard}}))
