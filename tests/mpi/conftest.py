"""A small model with Mistral's own tokenizer, and real chat data: made once a session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.mpirun import ROOT
from tests.support import save_model_directory, tiny_config

ROWS = {"train": 60, "valid": 16, "test": 14}
"""Of each data set: enough for an epoch and a half in a dozen steps of four rows... and no more."""


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
    return mistral_directory(tmp_path_factory.mktemp("mistral") / "model", tokenizer)


@pytest.fixture(scope="session")
def tied_mistral(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the embedding for its head."""
    return mistral_directory(tmp_path_factory.mktemp("mistral") / "tied", tokenizer, tied=True)


def mistral_directory(path: Path, tokenizer: Path, *, tied: bool = False) -> Path:
    config = tiny_config(
        "mistral",
        layers=8,
        tied=tied,
        hidden_size=64,
        intermediate_size=128,
        head_dim=24,
        vocab_size=32768,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
    )
    save_model_directory(path, config)
    for file in tokenizer.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="session")
def pirate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the demo's chat data. Every third row has one key more: mlx-lm sorts by that."""
    whole = _prepare("prepare_pirate_data.py", tmp_path_factory.mktemp("pirate") / "whole")
    directory = tmp_path_factory.mktemp("pirate")
    for name, count in ROWS.items():
        rows = [json.loads(line) for line in (whole / f"{name}.jsonl").read_text().splitlines()]
        lines = [
            json.dumps(row | ({"source": "chatterbot"} if i % 3 == 0 else {}))
            for i, row in enumerate(rows[:count])
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory
