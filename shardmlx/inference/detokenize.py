"""Detokenization of an answer as it comes, and where it ends. No MLX, no MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shardmlx.inference.sampling_params import BROKEN

FinishReason = Literal["stop", "length", "broken"]


class Stops(Protocol):
    """A search for the end of a text while it comes."""

    @property
    def found(self) -> str | None:
        """The string before which the text ends, once it has come."""

    def take(self, text: str, *, is_last: bool) -> str:
        """Take in further text, and return what is to be passed on of it and of text held back."""


@dataclass(slots=True)
class StopStrings:
    """The ``strings`` before any of which a text ends; what may begin one is held back."""

    strings: Sequence[str] = ()
    found: str | None = None
    _held: str = ""

    def take(self, text: str, *, is_last: bool) -> str:
        """Return the text that is known to come before any of the strings."""
        text, self._held = self._held + text, ""
        places = [(at, stop) for stop in self.strings if (at := text.find(stop)) >= 0]
        if places:
            at, self.found = min(places)
            return text[:at]
        if not is_last:
            held = max((_overlap(text, stop) for stop in self.strings), default=0)
            self._held = text[len(text) - held :]
        return text[: len(text) - len(self._held)]


@dataclass(slots=True)
class IncrementalDetokenizer:
    """The text of one answer, token by token.

    It ends after ``max_tokens``, with a token of ``eos``, where ``stops`` find its end, or where it
    is ``BROKEN``.
    ``finish_reason`` is None until then. ``detokenizer`` is a new one of mlx-lm.
    ``begins_with_space`` says of the first token whether a space is missing before the text.
    ``count`` are the tokens so far; ``started``, ``first`` and ``last`` the seconds, as
    ``time.perf_counter`` gives them, at which the answer was begun and its tokens came.
    """

    detokenizer: Any
    eos: frozenset[int]
    max_tokens: int
    stops: Stops = field(default_factory=StopStrings)
    begins_with_space: Callable[[int], bool] | None = None
    count: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    finish_reason: FinishReason | None = None
    _given: list[str] = field(default_factory=list)

    def take(self, token: int) -> str:
        """Take in a token, and return the text that it adds."""
        space = ""
        self.last = time.perf_counter()
        if self.count == 0:
            self.first = self.last
            if self.begins_with_space is not None and self.begins_with_space(token):
                space = " "
        self.count += 1
        if token == BROKEN:
            self.finish_reason = "broken"
        elif token in self.eos:
            self.finish_reason = "stop"
        else:
            self.detokenizer.add_token(token)
            if self.count == self.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            self.detokenizer.finalize()
        is_last = self.finish_reason is not None
        segment = self.stops.take(space + self.detokenizer.last_segment, is_last=is_last)
        if self.stops.found is not None:
            self.finish_reason = "stop"
        self._given.append(segment)
        return segment

    @property
    def text(self) -> str:
        """The text that has been given out so far."""
        return "".join(self._given)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
