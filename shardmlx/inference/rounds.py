"""Rounds: items under way whose tokens come back to rank 0, some begun before the tokens of the one
before are known. No MLX, no MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardmlx.distributed.messages import Handle
from shardmlx.inference.commands import Decode, Item
from shardmlx.inference.drafts import Draft, accepted


@dataclass(slots=True)
class Round:
    """An item whose ``tokens`` come, a row for each sequence, or after each draft, and one for each
    guess of the model's head: in a message from the last rank with this ``handle``, or out of this
    process's ``graph``. One that ``runs_ahead`` was begun with the tokens of the round before,
    which nobody had read. Tokens of the sequences in ``void`` are dropped."""

    item: Item
    tokens: np.ndarray
    handle: Handle
    draft: Draft = field(default_factory=Draft)
    graph: Any = None
    runs_ahead: bool = False
    void: set[int] = field(default_factory=set)

    @property
    def right(self) -> list[int]:
        """The tokens that have come of its first sequence, without those after a wrong draft."""
        if not isinstance(self.item, Decode) or not self.item.drafts:
            return [int(self.tokens[0, 0])]
        came: list[int] = self.tokens[:, 0].tolist()
        return came[: 1 + accepted(self.item.drafts, came)]

    @property
    def is_void(self) -> bool:
        """True if all its sequences are void."""
        return len(self.void) == len(self.item.sequences)

    @property
    def is_guessed(self) -> bool:
        """True if it began with a guess of what comes of the round before."""
        return isinstance(self.item, Decode) and self.item.guess is not None

    @property
    def unsure(self) -> int:
        """The number of tokens of each sequence that entered and may not be of the text."""
        begins_with_known = not (self.is_guessed or self.runs_ahead)
        return self.item.length - begins_with_known


class DecodeRounds(deque[Round]):
    """The rounds under way, in order."""

    @property
    def valid(self) -> list[Round]:
        """The rounds of which some sequence is not void."""
        return [each for each in self if not each.is_void]

    def take(self, has_come: Callable[[Round], bool]) -> Round | None:
        """Return the next round if it has come, without void ones before it."""
        while self and has_come(self[0]):
            back = self.popleft()
            if not back.is_void:
                return back
        return None

    def following(self, back: Round) -> Round | None:
        """Return the round that began with a guess of what comes of one that was taken, if all
        drafts of this were right: others are void."""
        behind = self._on_guesses(back.item.sequences)
        return behind[0] if behind and len(back.right) == back.item.length else None

    def make_guesses_void(self, sequence: int) -> list[Round]:
        """Have rounds of a sequence that began with a guess come in vain; return them."""
        return _made_void(sequence, self._on_guesses((sequence,)))

    def forget_void(self) -> None:
        """Forget rounds that come in vain, where nobody sends their tokens."""
        kept = self.valid
        self.clear()
        self.extend(kept)

    def leave(self, sequence: int) -> list[Round]:
        """Have all that is under way of a sequence come in vain; return these rounds."""
        mine = [each for each in self if sequence in each.item.sequences]
        return _made_void(sequence, [each for each in mine if sequence not in each.void])

    def _on_guesses(self, sequences: tuple[int, ...]) -> list[Round]:
        found = (each for each in self.valid if each.is_guessed)
        return [each for each in found if each.item.sequences == sequences]


def _made_void(sequence: int, rounds: list[Round]) -> list[Round]:
    for each in rounds:
        each.void.add(sequence)
    return rounds
