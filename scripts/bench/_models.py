"""Provide what the benchmarks train: SmolLM2 and an 8-layer, 512-wide model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _compare import ROOT

SMOLLM2 = ROOT / ".cache/smollm2-135m-instruct"
PIRATE = ROOT / ".cache/pirate"

WIDE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
"""A Mistral-style model of 8 layers and width 512."""


def of_width(width: int) -> dict[str, int]:
    """Return changes to ``WIDE``: another width, the inner one in proportion."""
    return {"hidden_size": width, "intermediate_size": 11 * width // 4}


def check_prepared() -> None:
    """SystemExit unless the demo has prepared its model and data."""
    for path in (SMOLLM2, PIRATE):
        if not path.is_dir():
            raise SystemExit(f"{path} is not there: run scripts/demo.sh once, which prepares it")


def make_wide(directory: Path, **changes: Any) -> Path:
    """Write the 8-layer model with random weights and a tokenizer trained on the demo's data.

    ``changes`` are made to its configuration.
    """
    # Not before: a command line is read, and refused, without them.
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    config = {**WIDE, **changes}
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(config))
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(4096, config["vocab_size"]),
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def make_long_rows(directory: Path, rows: int = 64, characters: int = 12000) -> Path:
    """Write data with rows longer than any --max-seq-length here: cut, all have one length."""
    directory.mkdir(parents=True, exist_ok=True)
    text = " ".join(json.loads(line)["messages"][-1]["content"] for line in _lines())
    text *= -(-(characters + 100 * rows) // len(text))
    for name in ("train", "valid"):
        (directory / f"{name}.jsonl").write_text(
            "".join(
                json.dumps({"text": text[100 * i : 100 * i + characters]}) + "\n"
                for i in range(rows)
            )
        )
    return directory


def _lines() -> list[str]:
    return (PIRATE / "train.jsonl").read_text().splitlines()
