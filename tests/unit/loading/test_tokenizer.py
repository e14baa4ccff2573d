"""The tokenizer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from shardmlx.loading.tokenizer import read_tokenizer
from tests.helpers.refusals import refusal


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A directory with a tokenizer whose own end is token 1."""
    tokens = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    tokens.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_the_tokenizer_is_the_one_that_mlx_lm_loads(words: Path) -> None:
    assert read_tokenizer(words, False, {}).encode("a b c") == [2, 3, 0]


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (None, None, {1}),
        (3, None, {1, 3}),
        (3, "[4, 5]", {1, 3, 4, 5}),
        ([2, 3], "2", {1, 2, 3}),
        (None, "0", {0, 1}),
        (3, "null", {1, 3}),
        (3, '"</s>"', {1, 3}),
        (3, "}", {1, 3}),
    ],
)
def test_a_text_has_the_ends_of_all_files(
    config: Any, generation: str | None, ends: set[int], words: Path
) -> None:
    if generation is not None:
        (words / "generation_config.json").write_text(f'{{"eos_token_id": {generation}}}')
    assert read_tokenizer(words, False, {"eos_token_id": config}).eos_token_ids == ends


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    error = refusal(read_tokenizer, tmp_path, False, {})
    assert str(error).startswith(f"{tmp_path} holds no tokenizer that transformers can read: ")
    assert "\n" not in str(error)


@pytest.mark.parametrize("field", ['"rms_norm_eps": "1e-5"', '"rope_scaling": "linear"'])
def test_transformers_reads_config_json_too(field: str, words: Path) -> None:
    (words / "config.json").write_text(f'{{"model_type": "llama", {field}}}')
    error = refusal(read_tokenizer, words, False, {})
    assert str(error).startswith(f"{words} holds no tokenizer that transformers can read: ")
