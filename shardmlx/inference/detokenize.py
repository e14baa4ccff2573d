"""Detokenization of an answer as it comes, and where it ends. No MLX, no MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shardmlx.compat import decode_of, trims_first_space
from shardmlx.inference.sampling_params import BROKEN

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

FinishReason = Literal["stop", "length", "broken", "error"]

FEW = 4
"""Tokens that are decoded once more before a new one, whose text may depend on theirs."""

STRETCH = 8
"""New tokens with which the window is cut to the last few."""

MOST = 64
"""Tokens whose text may be held back because the next may change it."""

INCOMPLETE = "\ufffd"
"""A character in the place of bytes that are not a whole one."""


@dataclass(slots=True)
class StopStrings:
    """The ``strings`` before any of which a text ends; what may begin one is held back. Once one
    has come, it is ``found``."""

    strings: Sequence[str] = ()
    found: str | None = None
    _held: str = ""

    def take(self, text: str, *, is_last: bool) -> str:
        """Take in further text, and return what is to be passed on of it and of text held back."""
        if not self.strings:
            return text
        text = self._held + text
        end, stop = before_any(self.strings, text, is_last=is_last)
        self.found, self._held = stop or None, text[end:]
        return text[:end]


def before_any(marks: Sequence[str], text: str, *, is_last: bool) -> tuple[int, str]:
    """Return how much of ``text`` comes before the first of ``marks``, and that one; or how much is
    known to come before any, and "". The end of what ``is_last`` begins none."""
    places = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    end, mark = min(places, default=(len(text), ""))
    if not mark and not is_last:
        end -= max((overlap(text, each) for each in marks), default=0)
    return end, mark


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


class TokenText:
    """The text of tokens as they come, as if all were decoded at once, though only a few are.

    Without tokens ``before`` it, it may lose the space with which it begins (``trims``).
    """

    def __init__(
        self, decode: Callable[[list[int]], str], before: Sequence[int] = (), *, trims: bool = False
    ) -> None:
        self._decode = decode
        self._trims = trims and not before
        starts = (n for n in range(FEW, 2 * FEW) if decode([*before[-n:]])[:1] != INCOMPLETE)
        self._begin(before[-next(starts, FEW) :])

    def _begin(self, tokens: Sequence[int]) -> None:
        """Go on with a window of tokens whose text has been given."""
        self._window = [*tokens]
        self._given = len(self._decode(self._window)) if tokens else 0
        self._settled = len(tokens)

    def take(self, token: int | None, *, is_last: bool) -> str:
        """Take in a token if there is one, and return further text that will not change."""
        if token is not None:
            self._window.append(token)
        text = self._decode(self._window) if self._window else ""
        new = len(self._window) - self._settled
        is_sure = is_last or new > MOST
        held = 0 if is_sure else len(text) - len(text.rstrip(INCOMPLETE))
        begin, self._given = self._given, max(self._given, len(text) - held)
        segment = text[begin : self._given]
        if new >= STRETCH and not held:
            self._begin(self._window[-FEW if is_sure else self._settled :])
        if self._trims and segment:
            segment, self._trims = segment.removeprefix(" "), False
        return segment


@dataclass(slots=True)
class IncrementalDetokenizer:
    """An answer, token by token. It ends after ``max_tokens``, with a token of ``eos``, where
    ``stops`` find its end, or where it is ``BROKEN``; ``finish_reason`` is None until then.

    ``started``, ``first`` and ``last`` are ``time.perf_counter`` when it was begun and tokens came.
    """

    words: TokenText
    eos: frozenset[int]
    max_tokens: int
    stops: StopStrings = field(default_factory=StopStrings)
    count: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    finish_reason: FinishReason | None = None
    _given: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        tokenizer: TokenizerWrapper,
        max_tokens: int,
        stops: StopStrings | None = None,
        before: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        """Return a new answer, whose text goes on from the tokens ``before`` it."""
        trims = trims_first_space(tokenizer.detokenizer)
        words = TokenText(decode_of(tokenizer), before, trims=trims)
        eos = frozenset(tokenizer.eos_token_ids)
        return cls(words, eos, max_tokens, stops or StopStrings())

    def take(self, token: int) -> str:
        """Take in a token, and return the text that it adds."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.count += 1
        if token == BROKEN:
            self.finish_reason = "broken"
        elif token in self.eos:
            self.finish_reason = "stop"
        elif self.count == self.max_tokens:
            self.finish_reason = "length"
        is_last, is_part = self.finish_reason is not None, self.finish_reason in (None, "length")
        text = self.words.take(token if is_part else None, is_last=is_last)
        segment = self.stops.take(text, is_last=is_last)
        if self.stops.found is not None:
            self.finish_reason = "stop"
        self._given.append(segment)
        return segment

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._given)
