"""Rounds: items under way whose tokens come back to rank 0, some on a guess of what comes of the
one before. No MLX, no MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardmlx.distributed.messages import Handle
from shardmlx.inference.drafts import Draft, accepted
from shardmlx.inference.scheduler import Item


@dataclass(slots=True)
class Round:
    """An item whose ``tokens`` the last rank sends, a row for each sequence, or after each draft,
    and one for each guess of the model's head. It ``began`` before its ``draft`` was made, and took
    so many seconds ``on_rank_0``. Rank 0 drops the tokens of one that ``is_void`` as they come."""

    item: Item
    tokens: np.ndarray
    handle: Handle
    draft: Draft
    began: float
    on_rank_0: float = 0.0
    is_void: bool = False

    @property
    def right(self) -> list[int]:
        """The tokens that have come of its first sequence, without those after a wrong draft."""
        came: list[int] = self.tokens[:, 0].tolist()
        return came[: 1 + accepted(self.item.drafts, came)]


class DecodeRounds(deque[Round]):
    """The rounds under way, in order, and how many last tokens stages are to forget: each that was
    ``rejected`` is told once, with the next announcement."""

    def __init__(self) -> None:
        super().__init__()
        self._rejected: dict[int, int] = {}

    @property
    def valid(self) -> list[Round]:
        return [each for each in self if not each.is_void]

    def awaits(self, sequence: int) -> bool:
        """Return whether a token of a sequence is to come of a known one."""
        return any(sequence in each.item.sequences for each in self if each.item.guess is None)

    def take(self, has_come: Callable[[Handle], bool]) -> Round | None:
        """Return the next round if it has come, without void ones before it."""
        while self and has_come(self[0].handle):
            back = self.popleft()
            if not back.is_void:
                return back
        return None

    def following(self, back: Round) -> Round | None:
        """Return the round that began with a guess of what comes of one that was taken, if all
        drafts of this were right: others are void."""
        behind = self._on_guesses(back.item.sequences)
        return behind[0] if behind and len(back.right) == back.item.length else None

    def reject(self, sequence: int, count: int) -> int:
        """Have stages forget the last ``count`` tokens of a sequence; return the count."""
        if count > 0:
            self._rejected[sequence] = self._rejected.get(sequence, 0) + count
        return count

    def make_void(self, sequence: int) -> int:
        """Have rounds of a sequence that began with a guess come in vain, and stages forget their
        tokens; return how many these are, all of drafts."""
        behind = self._on_guesses((sequence,))
        for each in behind:
            each.is_void = True
        return self.reject(sequence, sum(each.item.length for each in behind))

    def take_rejected(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of a sequence and how many of its tokens stages are to forget."""
        rejected, self._rejected = self._rejected, {}
        return tuple(rejected.items())

    def _on_guesses(self, sequences: tuple[int, ...]) -> list[Round]:
        found = (each for each in self.valid if each.item.guess is not None)
        return [each for each in found if each.item.sequences == sequences]
