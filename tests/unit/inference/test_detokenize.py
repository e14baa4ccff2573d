"""Texts as they come: where they end, and what is held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardmlx.inference.detokenize import IncrementalDetokenizer, StopStrings, TokenText
from shardmlx.inference.sampling_params import BROKEN

EOS = 0


def letters(tokens: Sequence[int]) -> str:
    """Decode tokens of one character each."""
    return "".join(map(chr, tokens))


def test_a_text_may_break() -> None:
    stream = IncrementalDetokenizer(TokenText(letters), frozenset({EOS}), 9)
    assert stream.take(ord("a")) == "a"
    assert (stream.take(BROKEN), stream.finish_reason) == ("", "broken")


def segments(text: str, stop: Sequence[str] = (), most: int = 100) -> tuple[list[str], str | None]:
    """What comes of each token, and why it ends; ``$`` is the end-of-text token."""
    stream = IncrementalDetokenizer(TokenText(letters), frozenset({EOS}), most, StopStrings(stop))
    given = []
    for letter in text:
        given.append(stream.take(EOS if letter == "$" else ord(letter)))
        if stream.finish_reason is not None:
            break
    assert stream.text == "".join(given)
    return given, stream.finish_reason


def test_a_text_ends_with_its_last_token_or_at_its_length() -> None:
    assert segments("abc$") == (["a", "b", "c", ""], "stop")
    assert segments("abcdef", most=3) == (["a", "b", "c"], "length")


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert segments("a<b<ed", ["<end>"]) == (["a", "", "<b", "", "", "<ed"], None)
    assert segments("a<end>b", ["<end>"]) == (["a", "", "", "", "", ""], "stop")
    assert segments("ab<e$", ["<end>"]) == (["a", "b", "", "", "<e"], "stop")
    assert segments("ab<e", ["<end>"], most=4) == (["a", "b", "", "<e"], "length")


@pytest.mark.parametrize(("stop", "text"), [(["bc", "abcd"], "a"), (["c", "bcd"], "ab")])
def test_of_several_stop_strings_the_first_that_is_complete(stop: list[str], text: str) -> None:
    given, reason = segments("abcde", stop)
    assert ("".join(given), reason) == (text, "stop")


TEXT = "naïve café 東京 🙂 say don't , it ' s we ' ve a . b ?  two   three\n  four "
TEXTS = [TEXT[n:] + TEXT[:n] for n in range(0, len(TEXT), 6)]


def bpe(spaces: pre_tokenizers.PreTokenizer, decoder: decoders.Decoder) -> Tokenizer:
    """A tokenizer of pieces of up to three bytes or characters, or of words."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = spaces, decoder
    known = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in repr(spaces) else []
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<unk>", *(f"<0x{n:02X}>" for n in range(256) if not known)],
        initial_alphabet=known,
        limit_alphabet=40,
        show_progress=False,
    )
    made.train_from_iterator([text.replace("東京", "") for text in TEXTS], trainer)
    return made


def byte_level() -> Tokenizer:
    return bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def sentence_piece() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return bpe(
        pre_tokenizers.Metaspace(split=False),
        decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]),
    )


def metaspace() -> Tokenizer:
    return bpe(pre_tokenizers.Metaspace(), decoders.Metaspace())


@pytest.mark.parametrize("make", [byte_level, sentence_piece, metaspace])
def test_the_text_is_that_of_all_tokens_at_once(make: Callable[[], Tokenizer]) -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=make())
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        words = TokenText(tokenizer.decode)
        came = [words.take(token, is_last=False) for token in tokens]
        assert "".join([*came, words.take(None, is_last=True)]) == tokenizer.decode(tokens)
        assert sum(map(bool, came)) > len(tokens) // 4, "it comes while it is written"
        before = tokens[: len(tokens) // 2]
        if not tokenizer.decode(before).endswith("\ufffd"):
            more = TokenText(tokenizer.decode, before, trims=True)
            rest = [more.take(token, is_last=False) for token in tokens[len(before) :]]
            whole = tokenizer.decode(before) + "".join([*rest, more.take(None, is_last=True)])
            assert whole == tokenizer.decode(tokens)


@pytest.mark.parametrize("piece", ["a", " ", "\ufffd", " a", ""])
def test_few_tokens_are_decoded_at_a_time(piece: str) -> None:
    most = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal most
        most = max(most, len(tokens))
        return piece * len(tokens)

    words = TokenText(decode)
    came = [words.take(1, is_last=number == 999) for number in range(1000)]
    assert "".join(came) == piece * 1000
    assert most < 80


def test_a_text_may_lose_its_first_space() -> None:
    assert TokenText(letters, trims=True).take(ord(" "), is_last=True) == ""
    assert TokenText(letters, [ord("a")], trims=True).take(ord(" "), is_last=True) == " "
