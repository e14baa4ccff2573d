"""Schedule chunked prefill and decode of many sequences. No MLX, no MPI.

The first rank decides, one ``Item`` at a time, and every stage computes the items in that order::

    time ->
    stage 0   a0 a1 a2 b0 b1 .  A  B  A  B  A       a0 a1 a2: chunks of prompt a (prefill)
    stage 1      a0 a1 a2 b0 b1 .  A  B  A  B       A, B: a token for every sequence of a group
                                                          (decode)

A chunk of a prompt needs only the chunk before it on the same stage, so that chunks follow each
other through the stages. A token of a sequence needs the one before, which the last stage samples:
with as many groups of sequences as there are stages, which take turns, no stage waits. Here group B
is in stage 0 while group A is in stage 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.models.kv_cache import held


class ItemKind(Enum):
    """The kinds of items."""

    PREFILL = "prefill"
    """A chunk of one prompt. The prompt's last token enters with the first decode step; only where
    nothing else is to be computed does it make a chunk of its own, with which the sequence's first
    token is sampled."""
    DECODE = "decode"
    """A token of every sequence in a group; their next tokens are sampled."""
    IDLE = "idle"
    """An item without work: it carries news of ended sequences, and shows that the first rank
    is alive."""
    STOP = "stop"
    """The end: no more items come."""


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of work that every stage of the pipeline does in turn.

    ``sequences`` are those whose tokens enter, ``length`` of each, in the order of the rows; a
    prefill has one. The first chunk of a prompt brings the sequence's sampling ``params``, and the
    ``prefix`` with which its caches begin. Of the sequences that have ended, each stage first moves
    the ``kept`` out of their group, then copies the prefix, then forgets the ``dropped``.
    """

    kind: ItemKind
    sequences: tuple[int, ...] = ()
    length: int = 1
    samples: bool = True
    group: int | None = None
    kept: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    prefix: CachedPrefix | None = None
    params: Any = None

    def __str__(self) -> str:
        match self.kind:
            case ItemKind.PREFILL:
                return f"prefill of sequence {self.sequences[0]}, {self.length} tokens"
            case ItemKind.DECODE:
                plural = "s" * (len(self.sequences) > 1)
                return f"decode of sequence{plural} {_listed(self.sequences)}"
            case ItemKind.IDLE | ItemKind.STOP:
                return str(self.kind.value)


def _listed(sequences: Sequence[int]) -> str:
    shown = ", ".join(map(str, sequences[:4]))
    return shown + ", ..." * (len(sequences) > 4)


@dataclass(slots=True)
class _Prefill:
    """A prompt of which ``left`` tokens are still to enter."""

    sequence: int
    left: int
    context: int
    params: Any
    prefix: CachedPrefix | None = None
    is_begun: bool = False


@dataclass(slots=True)
class _DecodeGroup:
    """Sequences that advance together. ``in_flight`` while a token of them is being computed."""

    sequences: list[int] = field(default_factory=list)
    joining: list[int] = field(default_factory=list)
    in_flight: bool = False

    @property
    def size(self) -> int:
        """The number of sequences, those that join with the next step included."""
        return len(self.sequences) + len(self.joining)

    @property
    def is_ready(self) -> bool:
        """True if the group may make a decode step."""
        return self.size > 0 and not self.in_flight


class Scheduler:
    """The order of items for sequences that come and go (continuous batching).

    At most ``most`` sequences are under way at a time; with ``capacity``, a number of tokens, only
    as many as have room in it, each counted as long as the longest may become. Others wait in
    order. Prefill goes first, in chunks of ``chunk`` tokens, so that groups are full when they take
    their turns; with ``patience`` at most so many chunks come between two decode steps.

    ``find_prefix`` is called when a sequence's turn has come, and returns what the prefix cache
    holds of its prompt. Raises ``ValueError`` for numbers below 1.
    """

    def __init__(
        self,
        groups: int,
        most: int,
        chunk: int,
        patience: int | None = None,
        capacity: int | None = None,
    ) -> None:
        if min(groups, most, chunk) < 1 or (patience is not None and patience < 1):
            raise ValueError(f"groups {groups}, most {most}, chunk {chunk}, patience {patience}")
        self.find_prefix: Callable[[int], CachedPrefix | None] = lambda sequence: None
        self.capacity = capacity
        self._most = most
        self._chunk = chunk
        self._patience = patience
        self._chunks_since = 0
        self._groups = [_DecodeGroup() for _ in range(groups)]
        self._turns = deque(range(groups))
        self._waiting: deque[_Prefill] = deque()
        self._current: _Prefill | None = None
        self._open: dict[int, int] = {}
        self._kept: list[int] = []
        self._dropped: list[int] = []

    @property
    def is_idle(self) -> bool:
        """True while no sequence is under way or waits."""
        return not self._open and not self._waiting

    @property
    def reserved(self) -> int:
        """Tokens of cache that are taken: each sequence counts as long as the longest may become,
        since those of a group are padded."""
        return len(self._open) * held(max(self._open.values(), default=0))

    def add(self, sequence: int, tokens: int, params: Any = None, context: int = 0) -> None:
        """Queue a prompt of so many tokens, which may become a sequence of ``context`` tokens.

        Raises ``ValueError`` if it has no tokens, or would never have room in ``capacity``.
        """
        if tokens < 1:
            raise ValueError(f"a prompt of {tokens} tokens")
        if self.capacity is not None and held(context) > self.capacity:
            raise ValueError(f"a sequence of {context} tokens, where {self.capacity} are kept")
        self._waiting.append(_Prefill(sequence, tokens, context, params))

    def next(self) -> Item | None:
        """Return what the pipeline computes next; None while that depends on items under way."""
        prompt = self._next_prompt()
        ready = next((g for g in self._turns if self._groups[g].is_ready), None)
        patient = self._patience is None or self._chunks_since < self._patience
        if prompt is not None and (ready is None or patient):
            self._chunks_since += 1
            return self._chunk_of(prompt)
        if ready is None:
            return None
        self._chunks_since = 0
        self._turns.remove(ready)
        self._turns.append(ready)
        group = self._groups[ready]
        group.sequences += group.joining
        group.joining = []
        group.in_flight = True
        kept, dropped = self._take_ended()
        return Item(
            ItemKind.DECODE, tuple(group.sequences), group=ready, kept=kept, dropped=dropped
        )

    def rest(self) -> Item:
        """Return an item without work, to be issued while there is none."""
        kept, dropped = self._take_ended()
        return Item(ItemKind.IDLE, kept=kept, dropped=dropped)

    def foreseen(self) -> Item | None:
        """Guess the next item where ``next`` has none: the decode step of the group that has been
        under way longest, which comes if no sequence joins or leaves it."""
        if self._next_prompt() is not None:
            return None
        longest = next((g for g in self._turns if self._groups[g].in_flight), None)
        if longest is None:
            return None
        group = self._groups[longest]
        if group.joining:
            return None
        return Item(ItemKind.DECODE, tuple(group.sequences), group=longest)

    def returned(self, item: Item) -> None:
        """Note that the tokens of an item have been sampled. Its sequences go on, unless ``finish``
        is called."""
        if item.kind is ItemKind.DECODE and item.group is not None:
            self._groups[item.group].in_flight = False
        elif item.kind is ItemKind.PREFILL and item.samples:
            self._join(item.sequences[0])

    def finish(self, sequence: int, *, keep: bool = False) -> None:
        """End a sequence of which no token is under way, even before its prefill has begun. The
        stages keep or drop its caches."""
        for group in self._groups:
            for sequences in (group.sequences, group.joining):
                if sequence in sequences:
                    sequences.remove(sequence)
        if self._open.pop(sequence, None) is None:
            self._waiting = deque(prompt for prompt in self._waiting if prompt.sequence != sequence)
            return
        if self._current is not None and self._current.sequence == sequence:
            self._current = None
        if keep:
            self._kept.append(sequence)
        else:
            self._dropped.append(sequence)

    def forget(self, sequences: Sequence[int]) -> None:
        """Have the stages drop the caches of sequences that were kept."""
        self._dropped += sequences

    def _next_prompt(self) -> _Prefill | None:
        if self._current is None and self._waiting and self._has_room(self._waiting[0]):
            prompt = self._current = self._waiting.popleft()
            self._open[prompt.sequence] = prompt.context
        return self._current

    def _has_room(self, prompt: _Prefill) -> bool:
        sequences = len(self._open) + 1
        longest = max(prompt.context, *self._open.values(), 0)
        return sequences <= self._most and (
            self.capacity is None or sequences * held(longest) <= self.capacity
        )

    def _chunk_of(self, prompt: _Prefill) -> Item:
        if not prompt.is_begun:
            # Now, and not when its turn has come: what is forgotten for it goes with this item.
            prompt.is_begun = True
            prompt.prefix = self.find_prefix(prompt.sequence)
            if prompt.prefix is not None:
                prompt.left -= prompt.prefix.length
        # The first token is sampled from the prompt's last one, as in mlx-lm: in the group's next
        # decode step, or in a chunk of its own where nothing else of the prompt is to be computed.
        is_last = prompt.left == 1
        length = 1 if is_last else min(self._chunk, prompt.left - 1)
        kept, dropped = self._take_ended()
        item = Item(
            ItemKind.PREFILL,
            (prompt.sequence,),
            length,
            samples=is_last,
            kept=kept,
            dropped=dropped,
            prefix=prompt.prefix,
            params=prompt.params,
        )
        prompt.left -= length
        prompt.params = prompt.prefix = None
        if prompt.left <= 1:
            self._current = None
        if prompt.left == 1:
            self._join(prompt.sequence)
        return item

    def _join(self, sequence: int) -> None:
        smallest = min(self._groups, key=lambda group: (group.size, group.in_flight))
        smallest.joining.append(sequence)

    def _take_ended(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ended = tuple(self._kept), tuple(self._dropped)
        self._kept, self._dropped = [], []
        return ended
