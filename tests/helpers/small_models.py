"""A small model with Mistral's own tokenizer, and real chat data: made once a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from testbed.small_models import (
    pirate_directory,
    prepared,
    small_directory,
    tokenizer_directory,
    with_tokenizer,
)
from testbed.tiny_models import tiny_config


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tokenizer of Mistral-7B-Instruct-v0.3."""
    return prepared("prepare_mistral_tokenizer.py", tmp_path_factory.mktemp("mistral") / "files")


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
    return with_tokenizer(path, config, tokenizer)


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


@contextmanager
def limits_kept() -> Iterator[None]:
    """Put MLX's limits back: a run leaves its own to the end of its process, and here that goes
    on."""
    limits = (mx.set_memory_limit, mx.set_cache_limit)
    before = [set_limit(0) for set_limit in limits]
    for set_limit, nbytes in zip(limits, before, strict=True):
        set_limit(nbytes)
    try:
        yield
    finally:
        for set_limit, nbytes in zip(limits, before, strict=True):
            set_limit(nbytes)


@pytest.fixture
def limited_to_a_test() -> Iterator[None]:
    with limits_kept():
        yield
