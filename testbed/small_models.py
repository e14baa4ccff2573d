"""Directories of small models with tokenizers, and of real chat data to train them on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from testbed.further_configs import FURTHER
from testbed.jobs import ROOT
from testbed.tiny_models import save_model_directory, tiny_config
from testbed.undeclared_configs import UNDECLARED

ROWS = {"train": 32, "valid": 16, "test": 14}
"""Rows of each data set: ten steps of four begin a second epoch."""

SMALL_VOCABULARY = 400


def prepared(script: str, output: Path) -> Path:
    """Let a script of scripts/ make its output, and return that."""
    subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--output", output],
        check=True,
        capture_output=True,
    )
    return output


def pirate_directory(path: Path, whole: Path) -> Path:
    """Write some rows of the demo's data to ``path``, and all of it to ``whole``."""
    prepared("prepare_pirate_data.py", whole)
    path.mkdir()
    for name, count in ROWS.items():
        rows = [json.loads(line) for line in (whole / f"{name}.jsonl").read_text().splitlines()]
        lines = [
            json.dumps(row | ({"source": "chatterbot"} if i % 3 == 0 else {}))
            for i, row in enumerate(rows[:count])
        ]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return path


def tokenizer_directory(path: Path, data: Path, vocabulary: int = SMALL_VOCABULARY) -> Path:
    """Write a tokenizer of so many tokens that has learnt from ``data``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((data / "train.jsonl").read_text().splitlines(), trainer)
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for turn in messages %}{{ turn['role'][0] + ': ' + turn['content'] "
        "+ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def small_directory(path: Path, tokenizer: Path, **overrides: Any) -> Path:
    """Write a model of five layers, or as ``overrides`` say."""
    config = tiny_config(layers=5, vocab_size=SMALL_VOCABULARY, eos_token_id=1, **overrides)
    return with_tokenizer(path, config, tokenizer)


def undeclared_directory(path: Path, tokenizer: Path, kind: str) -> Path:
    """Write a model of no declared family."""
    config = {**UNDECLARED, **FURTHER}[kind]
    inner = "text_config" if "text_config" in config else None
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), SMALL_VOCABULARY)
    sizes["eos_token_id"] = 1
    config = {**config, **sizes, **({inner: {**config[inner], **sizes}} if inner else {})}
    return with_tokenizer(path, config, tokenizer)


def with_tokenizer(path: Path, config: dict[str, Any], tokenizer: Path) -> Path:
    """Write a model of a configuration with random weights, and the files of a tokenizer."""
    save_model_directory(path, config)
    return Path(shutil.copytree(tokenizer, path, dirs_exist_ok=True))
