"""The prefix cache: which ended sequences keep their KV caches for prompts that begin like them,
like a conversation that grows. Only the bookkeeping is here: no MLX, no MPI.

A state of a recurrent layer cannot be cut. Its copies are kept where a chunk ends at a *border*: at
the end of each prompt, and where a prompt leaves the beginning that it shares with a kept sequence.
Another prompt takes the beginning up to a border.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from shardmlx.common.digests import bytes_digest
from shardmlx.models.sizes.kv_cache import CacheQuantisation, held
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.planning.memory.generation import INHERITED, MOST_COPIES, cuttable

SHORTEST = 16
"""Tokens of the shortest prefix worth taking: to compute fewer again costs little. A border lies as
many before a prompt's end, where templates open the answer in another way than they repeat it."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix of a prompt: its first ``length`` tokens are those of the kept ``sequence``, all of
    them if it ``is_whole``; then the ``borders`` are taken over."""

    sequence: int
    length: int
    is_whole: bool
    borders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """A kept sequence, with copies of states after so many tokens as its ``borders`` say. It was
    computed by an ``adapter``: its number, 0 for none."""

    tokens: np.ndarray
    borders: tuple[int, ...]
    adapter: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int], borders: Sequence[int] = (), adapter: int = 0) -> KeptPrefix:
        """Return the one of these tokens."""
        return cls(np.array(tokens, np.int32), tuple(borders), adapter)

    @property
    def key(self) -> str:
        """The name of its files."""
        digest = bytes_digest(self.tokens.tobytes() + bytes(str(self.borders), "ascii"))
        return f"{digest[:16]}_{len(self.tokens)}"


@dataclass
class PrefixCache:
    """The ``kept`` sequences, the least recently used first. Only those of fewer than ``trimmable``
    tokens can be cut, others at borders if it ``has_borders``; a prefix of fewer than ``shortest``
    is not worth it. Caches of ``quantised`` tokens and more are quantised, and serve only where
    those of the prompt would be."""

    trimmable: int = sys.maxsize
    shortest: int = SHORTEST
    _: KW_ONLY
    has_borders: bool = False
    quantised: int = sys.maxsize
    kept: dict[int, KeptPrefix] = field(default_factory=dict, init=False)
    tokens: int = field(default=0, init=False)
    """Tokens for which the caches of all kept sequences have room."""
    _copies: int = field(default=0, init=False)

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        max_kv_size: int | None = None,
        shortest: int = SHORTEST,
        quantisation: CacheQuantisation | None = None,
    ) -> PrefixCache:
        """Return an empty one for a model whose caches have at most ``max_kv_size`` tokens, and a
        ``quantisation`` if they are quantised."""
        if shape.has_dynamic_rope:  # a beginning differs with what follows
            shortest = sys.maxsize
        has_borders = not shape.family.takes_cuts
        return cls(
            cuttable(shape, max_kv_size),
            shortest,
            has_borders=has_borders,
            quantised=sys.maxsize if quantisation is None else quantisation.border,
        )

    def keep(
        self, sequence: int, tokens: Sequence[int], borders: Sequence[int] = (), adapter: int = 0
    ) -> None:
        """Keep a sequence; ``tokens`` are those that have entered its caches, by an ``adapter``."""
        kept = KeptPrefix.of(tokens, borders, adapter)
        self.kept[sequence] = kept
        self.tokens += held(len(kept.tokens))
        self._copies += 1 + len(kept.borders)

    def _forget(self, sequence: int) -> None:
        kept = self.kept.pop(sequence)
        self.tokens -= held(len(kept.tokens))
        self._copies -= 1 + len(kept.borders)

    def forget_adapter(self, adapter: int) -> list[int]:
        """Forget the sequences of an adapter; return their numbers."""
        gone = [sequence for sequence, kept in self.kept.items() if kept.adapter == adapter]
        for sequence in gone:
            self._forget(sequence)
        return gone

    def borders(self, prompt: Sequence[int], adapter: int = 0) -> tuple[int, ...]:
        """Return after how many tokens of ``prompt``, by an ``adapter``, a copy of states is to be
        kept, in order."""
        if not self.has_borders:
            return ()
        common = (
            common_length(kept.tokens, np.array(prompt, np.int32))
            for kept in self.kept.values()
            if kept.adapter == adapter
        )
        last = len(prompt) - 1 - self.shortest
        wanted = {last, max(common, default=0)}
        return tuple(sorted(each for each in wanted if self.shortest <= each <= last))

    def take(self, prompt: Sequence[int], adapter: int = 0) -> CachedPrefix | None:
        """Return the longest kept prefix of ``prompt``, by an ``adapter``, but for its last token,
        whose logits are wanted. A sequence that is taken as a whole is kept no longer."""
        wanted = np.array(prompt[:-1], np.int32)
        best: CachedPrefix | None = None
        for sequence, kept in self.kept.items():
            if kept.adapter != adapter:
                continue
            length = common_length(kept.tokens, wanted)
            is_whole = length == len(kept.tokens)
            if not is_whole and len(kept.tokens) >= self.trimmable:
                length = max((each for each in kept.borders if each <= length), default=0)
            if length < self.quantised <= len(kept.tokens):
                continue
            if length >= (best.length if best else self.shortest):
                borders = kept.borders[:INHERITED] if is_whole else ()
                best = CachedPrefix(sequence, length, is_whole, borders)
        if best is None:
            return None
        if best.is_whole:
            self._forget(best.sequence)
        else:
            self.kept[best.sequence] = self.kept.pop(best.sequence)  # used last
        return best

    def shrink(self, most: int) -> list[int]:
        """Forget sequences until ``tokens`` is at most ``most``, and there are not too many states;
        return their numbers."""
        gone = []
        while self.kept and (self.tokens > most or self._has_too_many_copies):
            gone.append(next(iter(self.kept)))
            self._forget(gone[-1])
        return gone

    @property
    def _has_too_many_copies(self) -> bool:
        return self.has_borders and self._copies > MOST_COPIES


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length
