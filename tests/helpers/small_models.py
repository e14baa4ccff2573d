"""A small model with Mistral's own tokenizer, and real chat data: made once a session."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.helpers.further_configs import FURTHER
from tests.helpers.jobs import ROOT
from tests.helpers.models_and_batches import save_model_directory, tiny_config
from tests.helpers.undeclared_configs import UNDECLARED

ROWS = {"train": 32, "valid": 16, "test": 14}
"""Rows of each data set: ten steps of four begin a second epoch."""

SMALL_VOCABULARY = 400


def _prepare(script: str, output: Path) -> Path:
    subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--output", output],
        check=True,
        capture_output=True,
    )
    return output


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tokenizer of Mistral-7B-Instruct-v0.3."""
    return _prepare("prepare_mistral_tokenizer.py", tmp_path_factory.mktemp("mistral") / "files")


@pytest.fixture(scope="session")
def mistral(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directory: eight layers of Mistral's kind, untied, explicit head_dim, float32."""
    path = tmp_path_factory.mktemp("mistral") / "model"
    config = tiny_config(
        "mistral",
        layers=8,
        hidden_size=64,
        intermediate_size=128,
        head_dim=24,
        vocab_size=32768,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _with_tokenizer(path, config, tokenizer)


@pytest.fixture(scope="session")
def pirate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the demo's chat data. Every third has one key more: mlx-lm sorts by that."""
    directory = tmp_path_factory.mktemp("pirate")
    return pirate_directory(directory / "some", directory / "whole")


@pytest.fixture(scope="session")
def small_tokenizer(pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a tokenizer of 400 tokens: 32768 would be most of a tiny model's work."""
    return tokenizer_directory(tmp_path_factory.mktemp("small-tokenizer"), pirate)


@pytest.fixture(scope="session")
def small(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directory: five tiny llama layers, untied, float32."""
    return small_directory(tmp_path_factory.mktemp("small") / "model", small_tokenizer)


@pytest.fixture(scope="session")
def small_tied(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directory: the same with the embedding for its head."""
    return small_directory(tmp_path_factory.mktemp("small") / "tied", small_tokenizer, tied=True)


@pytest.fixture(scope="session")
def small_quantised(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directory: the same in 4 bits, with heads that can be quantised too."""
    return small_directory(
        tmp_path_factory.mktemp("small") / "quantised",
        small_tokenizer,
        quantization={"group_size": 32, "bits": 4},
        head_dim=32,
    )


def pirate_directory(path: Path, whole: Path) -> Path:
    """Write some rows of the demo's data to ``path``, and all of it to ``whole``."""
    _prepare("prepare_pirate_data.py", whole)
    path.mkdir()
    for name, count in ROWS.items():
        rows = [json.loads(line) for line in (whole / f"{name}.jsonl").read_text().splitlines()]
        lines = [
            json.dumps(row | ({"source": "chatterbot"} if i % 3 == 0 else {}))
            for i, row in enumerate(rows[:count])
        ]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return path


def tokenizer_directory(path: Path, data: Path) -> Path:
    """Write a small tokenizer that has learnt from ``data``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SMALL_VOCABULARY,
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
    return _with_tokenizer(path, config, tokenizer)


def undeclared_directory(path: Path, tokenizer: Path, kind: str) -> Path:
    """Write a model of no declared family."""
    config = {**UNDECLARED, **FURTHER}[kind]
    inner = "text_config" if "text_config" in config else None
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), SMALL_VOCABULARY)
    sizes["eos_token_id"] = 1
    config = {**config, **sizes, **({inner: {**config[inner], **sizes}} if inner else {})}
    return _with_tokenizer(path, config, tokenizer)


def _with_tokenizer(path: Path, config: dict[str, Any], tokenizer: Path) -> Path:
    save_model_directory(path, config)
    return Path(shutil.copytree(tokenizer, path, dirs_exist_ok=True))


@pytest.fixture
def limited_to_a_test() -> Iterator[None]:
    """A run leaves MLX's limits to the end of its process, and here that goes on."""
    limits = (mx.set_memory_limit, mx.set_cache_limit)
    before = [set_limit(0) for set_limit in limits]
    for set_limit, nbytes in zip(limits, before, strict=True):
        set_limit(nbytes)
    yield
    for set_limit, nbytes in zip(limits, before, strict=True):
        set_limit(nbytes)
