"""The tokenizer of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from shardmlx.errors import UserError
from shardmlx.models.tokenizer import read_tokenizer


def test_the_tokenizer_is_the_one_that_mlx_lm_loads(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    tokenizer = read_tokenizer(tmp_path, False, eos=1)

    assert tokenizer.encode("a b c") == [2, 3, 0]
    assert tokenizer.eos_token_ids == {1}


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError) as error:
        read_tokenizer(tmp_path, False, eos=1)
    assert str(error.value).startswith(
        f"{tmp_path} holds no tokenizer that transformers can read: "
    )
    assert "\n" not in str(error.value)
