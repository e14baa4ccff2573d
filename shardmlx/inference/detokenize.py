"""Detokenization of an answer as it comes, and where it ends. No MLX, no MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardmlx.inference.sampling_params import BROKEN

FinishReason = Literal["stop", "length", "broken"]


@dataclass(slots=True)
class IncrementalDetokenizer:
    """The text of one answer, token by token.

    It ends after ``max_tokens``, with a token of ``eos``, before any of the strings ``stop``, or
    where it is ``BROKEN``.
    ``finish_reason`` is None until then. ``detokenizer`` is a new one of mlx-lm.
    ``begins_with_space`` says of the first token whether a space is missing before the text.
    ``count`` are the tokens so far; ``started``, ``first`` and ``last`` the seconds, as
    ``time.perf_counter`` gives them, at which the answer was begun and its tokens came.
    """

    detokenizer: Any
    eos: frozenset[int]
    max_tokens: int
    stop: Sequence[str] = ()
    begins_with_space: Callable[[int], bool] | None = None
    count: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    finish_reason: FinishReason | None = None
    _given: list[str] = field(default_factory=list)
    _held: str = ""

    def take(self, token: int) -> str:
        """Take in a token, and return the text that it adds. Text with which a stop string may
        begin is held back."""
        self.last = time.perf_counter()
        if self.count == 0:
            self.first = self.last
            if self.begins_with_space is not None and self.begins_with_space(token):
                self._held = " "
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
        segment = self._until_stop(self._held + self.detokenizer.last_segment)
        self._given.append(segment)
        return segment

    @property
    def text(self) -> str:
        """The text that has been given out so far."""
        return "".join(self._given)

    def _until_stop(self, text: str) -> str:
        self._held = ""
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.finish_reason = "stop"
            return text[: min(found)]
        if self.finish_reason is None:
            held = max((_overlap(text, stop) for stop in self.stop), default=0)
            self._held = text[len(text) - held :]
        return text[: len(text) - len(self._held)]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
