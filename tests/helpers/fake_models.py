"""Models whose files are headers and zeros: of any size, without MLX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmlx.modelfiles.parts import planned_tensors
from tests.helpers.hub_server import File, safetensors_file, text_file

TINY: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

MISTRAL_LARGE = {
    "model_type": "mistral",
    "num_hidden_layers": 88,
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

MISTRAL_7B = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

Tensors = dict[str, tuple[str, list[int], int]]
"""Name -> (dtype, shape, bytes)."""


def tensors_of(config: Mapping[str, Any]) -> Tensors:
    return {
        name: (place.dtype, list(place.shape), place.nbytes)
        for name, place in planned_tensors(config).items()
    }


def model_files(
    config: Mapping[str, Any], shards: int = 1, tensors: Tensors | None = None
) -> dict[str, File]:
    """config.json, index and so many files of about the same size."""
    tensors = tensors_of(config) if tensors is None else tensors
    total = sum(nbytes for _, _, nbytes in tensors.values())
    parts: list[Tensors] = [{} for _ in range(shards)]
    before = 0
    for name, tensor in tensors.items():
        parts[min(before * shards // max(total, 1), shards - 1)][name] = tensor
        before += tensor[2]
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    if shards == 1:
        names = ["model.safetensors"]
    index = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    return {
        "config.json": text_file(dict(config)),
        "model.safetensors.index.json": text_file(
            {"metadata": {"total_size": total}, "weight_map": index}
        ),
        **{file: safetensors_file(part) for file, part in zip(names, parts, strict=True)},
    }


def write(directory: Path, files: Mapping[str, File]) -> Path:
    """Write the files into a directory, sparse."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with (directory / name).open("wb") as file:
            file.write(content.head)
            file.truncate(content.size)
    return directory


def write_config(directory: Path, config: Mapping[str, Any]) -> Path:
    """Write the configuration alone, which is enough to plan with."""
    return write(directory, {"config.json": text_file(dict(config))})


def adapters(layers: range, rank: int = 8, **config: Any) -> dict[str, File]:
    """LoRA on the query projections of these layers, in float32."""
    tensors: Tensors = {}
    for layer in layers:
        prefix = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_a"] = ("F32", [64, rank], 64 * rank * 4)
        tensors[f"{prefix}.lora_b"] = ("F32", [rank, 64], 64 * rank * 4)
    content = {
        "fine_tune_type": "lora",
        "model": "tiny",
        "num_layers": len(layers),
        "lora_parameters": {"rank": rank, "scale": 20.0, "dropout": 0.0},
        **config,
    }
    return {
        "adapters.safetensors": safetensors_file(tensors),
        "adapter_config.json": text_file(content),
    }


def dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
