"""The prefix cache: which ended sequences keep their KV caches for prompts that begin like them,
like a conversation that grows. Only the bookkeeping is here: no MLX, no MPI.
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
    """A prefix of a prompt: its first ``length`` tokens are those of the kept ``sequence``, all of
    them if it ``is_whole``."""

    sequence: int
    length: int
    is_whole: bool


class PrefixCache:
    """The kept sequences, the least recently used first. Only those of fewer than ``trimmable``
    tokens can be cut; a prefix of fewer than ``shortest`` is not worth it."""

    def __init__(self, trimmable: int = sys.maxsize, shortest: int = SHORTEST) -> None:
        self._trimmable = trimmable
        self._shortest = shortest
        self._kept: dict[int, np.ndarray] = {}

    @classmethod
    def of(
        cls, shape: ModelShape, max_kv_size: int | None = None, shortest: int = SHORTEST
    ) -> PrefixCache:
        """Return an empty one for a model whose caches have at most ``max_kv_size`` tokens."""
        # Longer sequences have forgotten their beginning in a sliding window, or by the limit.
        limits = [each for each in (*shape.windows, max_kv_size) if each is not None]
        if not shape.family.takes_cuts:
            limits.append(0)
        if shape.has_dynamic_rope:  # a beginning differs with what follows
            shortest = sys.maxsize
        return cls(min(limits, default=sys.maxsize), shortest)

    @property
    def tokens(self) -> int:
        """Tokens for which the caches of all kept sequences have room."""
        return sum(held(len(tokens)) for tokens in self._kept.values())

    def keep(self, sequence: int, tokens: Sequence[int]) -> None:
        """Keep a sequence; ``tokens`` are those that have entered its caches."""
        self._kept[sequence] = np.array(tokens, np.int32)

    def take(self, prompt: Sequence[int]) -> CachedPrefix | None:
        """Return the longest kept prefix of ``prompt`` but for its last token, whose logits are
        wanted. A sequence that is taken as a whole is kept no longer."""
        wanted = np.array(prompt[:-1], np.int32)
        best: CachedPrefix | None = None
        for sequence, tokens in self._kept.items():
            length = _common(tokens, wanted)
            is_whole = length == len(tokens)
            can_be_taken = is_whole or len(tokens) < self._trimmable
            if can_be_taken and length >= (best.length if best else self._shortest):
                best = CachedPrefix(sequence, length, is_whole)
        if best is not None:
            tokens = self._kept.pop(best.sequence)
            if not best.is_whole:
                self._kept[best.sequence] = tokens  # used last
        return best

    def shrink(self, most: int) -> list[int]:
        """Forget sequences until ``tokens`` is at most ``most``; return their numbers."""
        gone = []
        while self._kept and self.tokens > most:
            gone.append(next(iter(self._kept)))
            del self._kept[gone[-1]]
        return gone


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length
