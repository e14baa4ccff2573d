"""Long texts are cut before they become tokens, where the tokens that are taken stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from shardmlx.config.train import TrainConfig
from shardmlx.training.datasets import DataSets, read_data
from shardmlx.training.text_cuts import TextCuts
from testbed.rows import write
from tests.helpers.letters import Letters, listed

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of GPT-4 and Llama 3."""

BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
DIVIDED: dict[str, tuple[Any, Any]] = {
    "gpt-2": (None, pre.ByteLevel(add_prefix_space=False)),
    "llama 3": (None, pre.Sequence([pre.Split(Regex(GPT_4), "isolated"), BYTES])),
    "qwen": (norm.NFC(), pre.Sequence([pre.Split(Regex(GPT_4), "isolated"), BYTES])),
    "smollm": (None, pre.Sequence([pre.Digits(True), pre.ByteLevel(add_prefix_space=False)])),
    "metaspace": (None, pre.Metaspace()),
    "gemma": (norm.Replace(" ", "\u2581"), pre.Split(" ", "merged_with_previous")),
    "bert": (norm.BertNormalizer(), pre.BertPreTokenizer()),
    "llama 2": (norm.Sequence([norm.Prepend("\u2581"), norm.Replace(" ", "\u2581")]), None),
}
UNKNOWN: dict[str, tuple[Any, Any]] = {
    "two words at once": (None, pre.Split(Regex(r"\w+ \w+|\W"), "isolated")),
    "looks far ahead": (None, pre.Split(Regex(r"\w+(?=.*z)|\W"), "isolated")),
    "replaces words": (norm.Replace("a b", "c"), pre.ByteLevel()),
    "undivided": (None, pre.Metaspace(split=False)),
}


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of words, numbers, signs, lines and letters of several alphabets."""
    draw = random.Random(seed)
    words = [
        "the",
        "sea",
        "it's",
        "a",
        "1234",
        "...",
        "\n\n",
        "  ",
        "Été",
        "e\u0301",
        "海",
        "🏴‍☠️",
        "ship",
    ]
    return [" ".join(draw.choices(words, k=draw.randint(20, 4000))) for _ in range(count)]


def tokenizer_of(
    parts: tuple[Any, Any], added: Sequence[str] = (), vocabulary: int = 400
) -> TokenizerWrapper:
    normalizer, divided = parts
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    if normalizer is not None:
        backend.normalizer = normalizer
    if divided is not None:
        backend.pre_tokenizer = divided
    # A word at a time, so that no token goes on behind a space.
    learnt = [word for text in texts(3) for word in text.replace(" ", " \0").split("\0")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(learnt if divided is not None else _apart(learnt), trainer)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each) for each in added])
    inside: Any = PreTrainedTokenizerFast
    return TokenizerWrapper(inside(tokenizer_object=backend, eos_token="</s>"))


def _apart(words: Sequence[str]) -> list[str]:
    return [word.strip() for word in words]


@pytest.mark.parametrize("name", DIVIDED)
def test_the_first_tokens_of_a_long_text_stay_the_same(name: str) -> None:
    tokenizer = tokenizer_of(DIVIDED[name])
    cuts = TextCuts(tokenizer)
    seen = 0
    for text in texts(40, seed=1):
        whole = tokenizer.encode(text)
        for most in (8, 40, 100):
            beginning = cuts.beginning(text, most)
            if beginning is None:
                continue
            assert len(beginning) < len(text) / 2
            tokens = tokenizer.encode(beginning)
            if cuts.suffices(len(tokens), most):
                seen += 1
                assert tokens[:most] == whole[:most]
    assert seen > 20


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_that_may_look_at_all_words_gets_the_whole_text(name: str) -> None:
    cuts = TextCuts(tokenizer_of(UNKNOWN[name]))
    assert all(cuts.beginning(text, 8) is None for text in texts(5, seed=1))


def test_special_tokens_of_several_words_are_never_cut() -> None:
    (text,) = texts(1, seed=3)
    for added, is_cut in ((["<go on>"], False), (["<|go|>"], True)):
        cuts = TextCuts(tokenizer_of(DIVIDED["gpt-2"], added=added))
        assert (cuts.beginning(text * 3, 8) is not None) == is_cut
    assert TextCuts(Letters()).beginning(text * 3, 8) is None


def test_short_texts_and_texts_without_a_place_stay_whole() -> None:
    cuts = TextCuts(tokenizer_of(DIVIDED["gpt-2"]))
    assert cuts.beginning("the sea " * 10, 8) is None
    assert cuts.beginning("x" * 10_000, 8) is None
    assert cuts.beginning("the sea " * 1000, 8) is not None


def read(directory: Path, **options: Any) -> DataSets:
    config = TrainConfig.from_flat(data=str(directory), batch_size=1, **options)
    return read_data(config.wanted_data, tokenizer_of(DIVIDED["gpt-2"]), None)


def test_of_a_book_a_run_makes_the_tokens_that_it_takes(tmp_path: Path) -> None:
    book = "the sea is a ship " * 5000
    write(tmp_path, train=[{"text": book}, {"text": "a ship"}])
    data = read(tmp_path, max_seq_length=40)
    (long, _), (short, _) = listed(data.train)
    whole = tokenizer_of(DIVIDED["gpt-2"]).encode(book)
    assert 40 < len(long) < 2000 < len(whole)
    assert long[:40] == whole[:40]
    assert short[-1] == 1  # the end token
    assert any("1 of 2 sequences are longer" in each for each in data.warnings)
    assert any("the longest has over 40" in each for each in data.warnings)


def test_a_checkpoint_that_knows_all_tokens_of_a_book_is_compared_by_them(tmp_path: Path) -> None:
    write(tmp_path, train=[{"text": "the sea is a ship " * 5000}, {"text": "a ship"}])
    data = read(tmp_path, max_seq_length=40).train
    assert {*data.facts().as_json()} == {"samples", "content", "looked_at"}
    whole = read(tmp_path, max_seq_length=40_000).train.facts()
    assert data.facts({"sha256": ""}) == whole
