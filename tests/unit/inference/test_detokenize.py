"""Texts as they come: where they end, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardmlx.inference.detokenize import IncrementalDetokenizer, StopStrings
from shardmlx.inference.sampling_params import BROKEN

EOS = 0


class Letters:
    """A detokenizer of one character a token."""

    def __init__(self) -> None:
        self.last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = chr(token)

    def finalize(self) -> None:
        pass


def test_a_text_may_break() -> None:
    stream = IncrementalDetokenizer(Letters(), frozenset({EOS}), 9)
    assert stream.take(ord("a")) == "a"
    stream.detokenizer.last_segment = ""
    assert (stream.take(BROKEN), stream.finish_reason) == ("", "broken")


def segments(text: str, stop: Sequence[str] = (), most: int = 100) -> tuple[list[str], str | None]:
    """What comes of each token, and why it ends; ``$`` is the end-of-text token."""
    stream = IncrementalDetokenizer(Letters(), frozenset({EOS}), most, StopStrings(stop))
    given = []
    for letter in text:
        stream.detokenizer.last_segment = ""
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


def test_a_text_that_goes_on_may_begin_with_a_space() -> None:
    stream = IncrementalDetokenizer(
        Letters(), frozenset({EOS}), 9, begins_with_space=lambda token: True
    )
    assert [stream.take(ord("a")), stream.take(ord("b"))] == [" a", "b"]
