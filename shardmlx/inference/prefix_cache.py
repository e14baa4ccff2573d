"""The prefix cache: which ended sequences keep their KV caches for prompts that begin like them.

A conversation that grows does not compute its beginning again, and sequences that begin with the
same instructions compute them once. Only the bookkeeping is here: no MLX, no MPI.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmlx.models.kv_cache import held
from shardmlx.models.shape import ModelShape

SHORTEST = 16
"""Tokens of the shortest prefix worth taking: to compute fewer again costs little."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix of a prompt: its first ``length`` tokens are those of the kept ``sequence``.

    ``is_whole`` says that they are all of that sequence: its caches go over to the new one.
    """

    sequence: int
    length: int
    is_whole: bool


class PrefixCache:
    """The kept sequences, by their numbers, the least recently used first.

    Where ``trimmable`` is given, only sequences of fewer tokens can be cut to a shorter prefix: the
    sliding windows of longer ones have forgotten their beginning.
    """

    def __init__(self, trimmable: int | None = None, shortest: int = SHORTEST) -> None:
        self._trimmable = trimmable
        self._shortest = shortest
        self._kept: dict[int, np.ndarray] = {}

    @classmethod
    def of(
        cls, shape: ModelShape, max_kv_size: int | None = None, shortest: int = SHORTEST
    ) -> PrefixCache:
        """Return an empty one that knows how long a sequence may be before a sliding window or a
        limit makes its caches forget the beginning.

        The caches of a model that is not declared may hold a state, of which nothing can be taken
        away. With dynamic rotary embeddings a beginning differs with what follows.
        """
        limits = [window for window in shape.windows if window is not None]
        if not shape.is_declared:
            limits.append(0)
        if max_kv_size is not None:
            limits.append(max_kv_size)
        return cls(min(limits, default=None), sys.maxsize if shape.has_dynamic_rope else shortest)

    @property
    def tokens(self) -> int:
        """Tokens for which the caches of all kept sequences have room."""
        return sum(held(len(tokens)) for tokens in self._kept.values())

    def keep(self, sequence: int, tokens: Sequence[int]) -> None:
        """Keep a sequence; ``tokens`` are those that have entered its caches."""
        self._kept[sequence] = np.array(tokens, np.int32)

    def take(self, prompt: Sequence[int]) -> CachedPrefix | None:
        """Return the longest kept prefix of ``prompt``; None if it has fewer than ``shortest``
        tokens.

        The prompt's last token is never part of it, since its logits are wanted. A sequence that is
        taken as a whole is kept no longer.
        """
        wanted = np.array(prompt[:-1], np.int32)
        best: CachedPrefix | None = None
        for sequence, tokens in self._kept.items():
            length = _common(tokens, wanted)
            is_whole = length == len(tokens)
            can_be_cut = self._trimmable is None or len(tokens) < self._trimmable
            if (
                length >= self._shortest
                and (is_whole or can_be_cut)
                and (best is None or length >= best.length)
            ):
                best = CachedPrefix(sequence, length, is_whole)
        if best is not None:
            tokens = self._kept.pop(best.sequence)
            if not best.is_whole:
                self._kept[best.sequence] = tokens  # used last
        return best

    def shrink(self, most: int) -> list[int]:
        """Forget the least recently used sequences until ``tokens`` is at most ``most``, and return
        their numbers."""
        gone, tokens = [], self.tokens
        while self._kept and tokens > most:
            oldest = next(iter(self._kept))
            tokens -= held(len(self._kept.pop(oldest)))
            gone.append(oldest)
        return gone


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length
