"""Adapters in the forms in which PEFT and mlx-lm save them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from tests.helpers.models_and_batches import move_trained, with_adapters

CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 12,
    "lora_dropout": 0.1,
    "bias": "none",
    "init_lora_weights": True,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "loftq_config": {},
    "target_modules": ["q_proj", "down_proj"],
}


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


def save_peft(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, **config: Any
) -> dict[str, tuple[mx.array, mx.array]]:
    """Save LoRA of modules of such weights (out, in); return each one's (B, A).

    ``rank_pattern`` has the ranks of modules by their whole names.
    """
    directory.mkdir(parents=True)
    content = {**CONFIG, **config}
    keys = iter(mx.random.split(mx.random.key(seed), 2 * len(shapes)))
    pairs, tensors = {}, {}
    for module, (out, width) in shapes.items():
        rank = content["rank_pattern"].get(module, content["r"])
        b, a = (
            mx.random.normal((out, rank), key=next(keys)),
            mx.random.normal((rank, width), key=next(keys)),
        )
        pairs[module] = b, a
        kind = "lora_embedding_{}" if "embed" in module else "lora_{}.weight"
        # Of an embedding PEFT counts the rows as the input.
        first, second = (b.T, a.T) if "embed" in module else (a, b)
        tensors[f"base_model.model.{module}.{kind.format('A')}"] = mx.contiguous(first)
        tensors[f"base_model.model.{module}.{kind.format('B')}"] = mx.contiguous(second)
    mx.save_safetensors(str(directory / "adapter_model.safetensors"), tensors)
    (directory / "adapter_config.json").write_text(json.dumps(content))
    return pairs
