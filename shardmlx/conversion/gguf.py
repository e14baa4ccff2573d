"""A GGUF file in float16, with the names and the metadata that mlx-lm writes, tensor by tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. mlx-lm's own writer needs all
tensors in memory at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.gguf import HfVocab, permute_weights, prepare_metadata, translate_weight_names

from shardmlx.checkpoint.export import TensorSpec, specs_of
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.conversion.shards import Shards
from shardmlx.errors import UserError
from shardmlx.loading.manifest import ModelManifest
from shardmlx.modelfiles.safetensors_header import PlacedTensor
from shardmlx.models.families import FAMILIES

GGUF_FILE = "ggml-model-f16.gguf"

_ALIGNMENT = 32
_VERSION = 3
_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_TENSOR_TYPES = {"F32": 0, "F16": 1}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def check_gguf(model: LazyModel, source: Path) -> None:
    """Raise ``UserError`` for a model without a GGUF of mlx-lm that llama.cpp could use."""
    why = _why_not(model.config, source)
    if any(name.endswith(".scales") for name in model.weights):
        raise UserError("--gguf of a quantised model", "add --dequantize, and leave out --quantize")
    if why is not None:
        raise UserError(
            f"--gguf: {why}",
            "export without --gguf, and convert that with llama.cpp: python convert_hf_to_gguf.py "
            "DIR",
        )


def _why_not(config: Mapping[str, Any], source: Path) -> str | None:
    able = [name for name, family in FAMILIES.items() if family.has_gguf]
    if config.get("model_type") not in able:
        return f"mlx-lm writes GGUF of {', '.join(able)}, not of {config.get('model_type')}"
    heads = config["num_attention_heads"]
    if config.get("head_dim") not in (None, config["hidden_size"] // heads):
        return f"mlx-lm's GGUF has no head_dim, and this model has {config['head_dim']}"
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear"):
        return f"mlx-lm's GGUF has no rope_scaling of type {kind}"
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            return f"mlx-lm's GGUF is of layers without biases, and this model has {key}"
    try:
        tokenizer = json.loads((source / "tokenizer.json").read_bytes())
    except (OSError, ValueError):
        return "mlx-lm reads the words from tokenizer.json, and there is none"
    if "ByteLevel" in json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")]):
        return "mlx-lm writes tokenizers of SentencePiece, and this model's is a byte-level one"
    return None


def as_gguf(model: LazyModel) -> LazyModel:
    """Return the model with GGUF's names, order of rows and types: norms float32, else float16."""
    heads = model.config["num_attention_heads"]
    kv_heads = model.config.get("num_key_value_heads") or heads
    weights: dict[str, mx.array] = {}
    for name, array in model.weights.items():
        if name.endswith("self_attn.q_proj.weight"):
            array = permute_weights(array, heads, heads)
        elif name.endswith("self_attn.k_proj.weight"):
            array = permute_weights(array, heads, kv_heads)
        own, array = _written(name, array)
        weights[own] = array
    by_path = {each.path: replace(each, written=_written) for each in model.experts.values()}
    experts = {_name(name): by_path[each.path] for name, each in model.experts.items()}
    return replace(model, weights=weights, stored={}, experts=experts)


def _written(name: str, array: mx.array) -> tuple[str, mx.array]:
    dtype = mx.float32 if "norm" in name else mx.float16
    return _name(name), array.astype(mx.float32).astype(dtype)


def _name(name: str) -> str:
    for own, theirs in _EXPERTS.items():  # stacked in llama.cpp, too
        name = name.replace(f"block_sparse_moe.switch_mlp.{own}", theirs)
    translated: str = translate_weight_names(name)
    return translated


@dataclass(frozen=True, slots=True)
class GgufFile(Shards):
    """A file for all tensors, which begins with ``head``."""

    head: bytes

    def manifest(self, rank: int) -> ModelManifest:
        """Return the beginning of the file."""
        places, offset = {}, len(self.head)
        for spec in self.files[GGUF_FILE]:
            end = offset + spec.nbytes
            places[spec.name] = PlacedTensor(GGUF_FILE, spec.dtype, spec.shape, offset, end)
            offset = _aligned(end)
        return ModelManifest("", {}, {GGUF_FILE: self.head}, {GGUF_FILE: offset}, places)


def plan_gguf(model: LazyModel, source: Path) -> GgufFile:
    """Return the file for a model ``as_gguf``, whose tokenizer is in ``source``."""
    specs = specs_of(model.weights)
    metadata = prepare_metadata(dict(model.config), HfVocab.load(source))
    head = b"".join(_head(specs, metadata))
    head += b"\0" * (_aligned(len(head)) - len(head))
    return GgufFile({GGUF_FILE: specs}, {GGUF_FILE: 0}, head)


def _head(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> Iterator[bytes]:
    yield b"GGUF" + struct.pack("<IQQ", _VERSION, len(specs), len(metadata))
    for key, value in metadata.items():
        yield _string(key)
        yield from _value(value)
    offset = 0
    for spec in specs:
        sides = tuple(reversed(spec.shape))
        yield _string(spec.name)
        yield struct.pack(f"<I{len(sides)}Q", len(sides), *sides)
        yield struct.pack("<IQ", _TENSOR_TYPES[spec.dtype], offset)
        offset = _aligned(offset + spec.nbytes)


def _value(value: Any) -> Iterator[bytes]:
    """Yield type and content of a text, a list of texts, or an array of one type."""
    if isinstance(value, str):
        yield struct.pack("<I", _STRING) + _string(value)
    elif isinstance(value, list):
        yield struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        yield from map(_string, value)
    else:
        kind = _UINT32 if value.dtype == mx.uint32 else _FLOAT32
        numbers = np.array(value)
        if value.ndim:
            yield struct.pack("<IIQ", _ARRAY, kind, value.size)
        else:
            yield struct.pack("<I", kind)
        yield numbers.astype("<u4" if kind == _UINT32 else "<f4").tobytes()


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
