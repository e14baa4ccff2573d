"""Texts that have ended, whose keys and values are kept for prompts that begin like them. Pure.

A conversation that grows does not pay for its beginning again, and texts that begin with the same
instructions pay for them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmlx.models.kv_cache import held

SHORTEST = 16
"""Tokens; to compute fewer again is no trouble."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first ``length`` tokens of a prompt are those of ``text``, which was kept. ``is_whole``
    if they are all of it, so that nothing of it is left to keep."""

    text: int
    length: int
    is_whole: bool


class PrefixCache:
    """Which texts are kept, oldest use first, by their numbers.

    Only texts of fewer than ``trimmable`` tokens can be cut to a shorter beginning, where that is
    given: the caches of longer ones have forgotten some of it.
    """

    def __init__(self, trimmable: int | None = None, shortest: int = SHORTEST) -> None:
        self._trimmable = trimmable
        self._shortest = shortest
        self._kept: dict[int, np.ndarray] = {}

    @property
    def tokens(self) -> int:
        """That there is room for in the caches of all kept texts."""
        return sum(held(len(tokens)) for tokens in self._kept.values())

    def keep(self, text: int, tokens: Sequence[int]) -> None:
        """``tokens`` are those that have entered the caches of ``text``."""
        self._kept[text] = np.array(tokens, np.int32)

    def take(self, prompt: Sequence[int]) -> Beginning | None:
        """The longest beginning of ``prompt`` that is kept, but for its last token, whose logits
        are wanted. A whole text that is taken is kept no longer."""
        wanted = np.array(prompt[:-1], np.int32)
        best: Beginning | None = None
        for text, tokens in self._kept.items():
            length = _common(tokens, wanted)
            is_whole = length == len(tokens)
            can_be_cut = self._trimmable is None or len(tokens) < self._trimmable
            if (
                length >= self._shortest
                and (is_whole or can_be_cut)
                and (best is None or length >= best.length)
            ):
                best = Beginning(text, length, is_whole)
        if best is not None:
            tokens = self._kept.pop(best.text)
            if not best.is_whole:
                self._kept[best.text] = tokens  # used last
        return best

    def shrink(self, most: int) -> list[int]:
        """Forget texts, those used longest ago first, until at most so many ``tokens`` are kept;
        returns them."""
        gone = []
        while self._kept and self.tokens > most:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            gone.append(oldest)
        return gone


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length
