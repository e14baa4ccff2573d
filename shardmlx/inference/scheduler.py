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

Sequences take room in the KV caches as they grow, not for all that they may become. Where there is
no more, the one that began last is put back: its caches are dropped, and when there is room again
its tokens so far are computed again, as a prompt. It goes on as if nothing had been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.models.sizes.kv_cache import STEP, held


class ItemKind(Enum):
    """A chunk of one prompt; a token of every sequence in a group; no work, but news of ended
    sequences and a sign of life; the end of all items."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of work that every stage of the pipeline does in turn.

    ``sequences`` are those whose tokens enter, ``length`` of each, in the order of the rows; a
    prefill has one. If it ``samples``, their next tokens are sampled, after each that enters. The
    ``drafts`` are the tokens that enter after the known one, which may be a ``guess`` too, of what
    comes of the item before: if that is wrong, the item is void. Where the model's head drafts, the
    last stage is to guess so many tokens, ``guesses``, after those that are sampled; to this end a
    chunk tells the tokens ``following`` each that enters. The first chunk of a prompt brings the
    sequence's sampling ``params``, and the ``prefix`` with which its caches begin. After a chunk
    that ends at a ``border``, a number of tokens, stages keep a copy of the states. Each stage
    first moves the ``kept``, sequences that have ended, out of their group and drops the caches of
    those ``put_back``, then copies the prefix, then forgets the ``dropped``, which have ended too.
    Before all this, of each sequence of ``rejected`` it forgets so many last tokens. At last it
    reads the files of the ``restored``, pairs of a sequence and a key, and has files of the
    ``stored`` and of no others, unless they are as they were.
    """

    kind: ItemKind
    sequences: tuple[int, ...] = ()
    length: int = 1
    samples: bool = True
    group: int | None = None
    kept: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    put_back: tuple[int, ...] = ()
    prefix: CachedPrefix | None = None
    border: int = 0
    params: Any = None
    guess: int | None = None
    drafts: tuple[int, ...] = ()
    guesses: int = 0
    following: tuple[int, ...] = ()
    rejected: tuple[tuple[int, int], ...] = ()
    restored: tuple[tuple[int, str], ...] = ()
    stored: tuple[tuple[int, str], ...] | None = None

    @property
    def is_plain(self) -> bool:
        """True if nothing is guessed: the next step of the same sequences can be foreseen."""
        return self.guess is None and not (self.drafts or self.guesses)

    def __str__(self) -> str:
        if not self.sequences:
            return self.kind.value
        more = f" and {len(self.sequences) - 1} more" if len(self.sequences) > 1 else ""
        is_long = self.kind is ItemKind.PREFILL or self.drafts
        tokens = f", {self.length} tokens" if is_long else ""
        return f"{self.kind.value} of sequence {self.sequences[0]}{more}{tokens}"


@dataclass(slots=True)
class _Sequence:
    """A sequence of so many ``tokens``, of which ``left`` are still to be computed as a prompt, and
    which may become ``context``. Stages get its ``params`` with its first chunk alone."""

    number: int
    tokens: int
    left: int
    context: int
    params: Any
    borders: Sequence[int] = ()
    is_known: bool = False
    awaits: bool = False

    @property
    def room(self) -> int:
        """Tokens of its caches with the next one: mlx-lm's grow by a step from where they are."""
        return min(held(self.tokens) + STEP, held(self.context))


@dataclass(slots=True)
class _DecodeGroup:
    """Sequences that advance together. ``in_flight`` while a token of them is being computed."""

    sequences: list[int] = field(default_factory=list)
    joining: list[int] = field(default_factory=list)
    in_flight: bool = False

    @property
    def size(self) -> int:
        return len(self.sequences) + len(self.joining)


@dataclass
class Scheduler:
    """The order of items for sequences that come and go (continuous batching).

    At most ``most`` sequences are under way at a time; with ``capacity``, a number of tokens, only
    as many as have room in it, each counted as long as the longest is. Others wait in order, those
    that were put back before all others. Prefill goes first, in chunks of ``chunk`` tokens, so that
    groups are full when they take their turns; with ``patience`` at most so many chunks come
    between two decode steps. Where KV caches are ``quantised``, after so many tokens, a chunk ends.
    ``find_prefix`` says what the prefix cache holds of the prompt of a sequence whose turn has
    come, and at which borders its chunks also end.
    """

    groups: int
    most: int
    chunk: int
    patience: int | None = None
    capacity: int | None = None
    quantised: int = 0
    find_prefix: Callable[[int], tuple[CachedPrefix | None, Sequence[int]]] = lambda _: (None, ())

    def __post_init__(self) -> None:
        self._chunks_since = 0
        self._groups = [_DecodeGroup() for _ in range(self.groups)]
        self._turns = deque(range(self.groups))
        self._waiting: deque[_Sequence] = deque()
        self._current: _Sequence | None = None
        self._open: dict[int, _Sequence] = {}
        self._kept: list[int] = []
        self._dropped: list[int] = []
        self._put_back: list[int] = []

    @property
    def is_idle(self) -> bool:
        return not self._open and not self._waiting

    @property
    def reserved(self) -> int:
        """Tokens of cache that are taken with the next token of each: a sequence counts as long as
        the longest, since those of a group are padded."""
        return len(self._open) * max((each.room for each in self._open.values()), default=0)

    def add(self, sequence: int, tokens: int, params: Any = None, context: int = 0) -> None:
        """Queue a prompt of so many tokens, which may become ``context``. Raises ``ValueError`` if
        it has none, or would never have room in ``capacity``."""
        if tokens < 1:
            raise ValueError(f"a prompt of {tokens} tokens")
        if self.capacity is not None and held(context) > self.capacity:
            raise ValueError(f"a sequence of {context} tokens, where {self.capacity} are kept")
        self._waiting.append(_Sequence(sequence, tokens, tokens, context, params))

    def next(self) -> Item | None:
        """Return what the pipeline computes next; None while that depends on items under way."""
        if not self._make_room():
            return None
        prompt = self._next_prompt()
        waiting = (g for g in self._turns if self._groups[g].size and not self._groups[g].in_flight)
        ready = next(waiting, None)
        patient = self.patience is None or self._chunks_since < self.patience
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
        for sequence in group.sequences:
            self._open[sequence].awaits = True
        return Item(ItemKind.DECODE, tuple(group.sequences), group=ready, **self._take_ended())

    def idle_item(self) -> Item:
        return Item(ItemKind.IDLE, **self._take_ended())

    def foreseen(self) -> Item | None:
        """Guess the next item where ``next`` has none: the decode step of the group that has been
        under way longest, which comes if no sequence joins or leaves it."""
        longest = next((g for g in self._turns if self._groups[g].size), None)
        if self._next_prompt() is not None or longest is None:
            return None
        group = self._groups[longest]
        if group.joining or not group.in_flight:
            return None
        return Item(ItemKind.DECODE, tuple(group.sequences), group=longest)

    def returned(self, item: Item, tokens: int = 1, *, goes_on: bool = False) -> None:
        """Note that so many ``tokens`` of each sequence of an item have been sampled. If it
        ``goes_on``, others of its group are under way."""
        for sequence in item.sequences:
            self._open[sequence].tokens += tokens
            self._open[sequence].awaits = goes_on
        if item.group is not None:
            self._groups[item.group].in_flight = goes_on
        else:
            self._join(item.sequences[0])

    def finish(self, sequence: int, *, keep: bool = False) -> bool:
        """End a sequence of which no token is under way, even before its prefill has begun. The
        stages drop its caches, or ``keep`` them. Return whether they keep any."""
        waiting = next((each for each in self._waiting if each.number == sequence), None)
        if waiting is not None:
            self._waiting.remove(waiting)
            if waiting.is_known:  # it was put back: there is its sampling state
                self._dropped.append(sequence)
            return False
        self._take_out(sequence)
        (self._kept if keep else self._dropped).append(sequence)
        return keep

    def forget(self, sequences: Sequence[int]) -> None:
        """Have the stages drop the caches of sequences that were kept."""
        self._dropped += sequences

    def _make_room(self) -> bool:
        """Put back the sequences without room; return False where one awaits a token first."""
        while self.capacity is not None and self.reserved > self.capacity:
            # Never the first: it has room for all that it may become.
            last = next(reversed(self._open))
            if self._open[last].awaits:
                return False
            sequence = self._take_out(last)
            sequence.left = sequence.tokens
            self._waiting.appendleft(sequence)
            self._put_back.append(last)
        return True

    def _take_out(self, sequence: int) -> _Sequence:
        for group in self._groups:
            for sequences in (group.sequences, group.joining):
                if sequence in sequences:
                    sequences.remove(sequence)
            group.in_flight = group.in_flight and bool(group.sequences)
        if self._current is not None and self._current.number == sequence:
            self._current = None
        return self._open.pop(sequence)

    def _next_prompt(self) -> _Sequence | None:
        if self._current is None and self._waiting and len(self._open) < self.most:
            prompt = self._waiting[0]
            self._open[prompt.number] = prompt
            if self.capacity is None or self.reserved <= self.capacity:
                self._current = self._waiting.popleft()
            else:
                del self._open[prompt.number]
        return self._current

    def _chunk_of(self, prompt: _Sequence) -> Item:
        prefix = None
        if prompt.left == prompt.tokens:
            # Now, and not when its turn has come: what is forgotten for it goes with this item.
            prefix, prompt.borders = self.find_prefix(prompt.number)
            prompt.left -= prefix.length if prefix is not None else 0
        # The first token is sampled from the prompt's last one, as in mlx-lm: in the group's next
        # decode step, or in a chunk of its own where nothing else of the prompt is to be computed.
        is_last = prompt.left == 1
        done = prompt.tokens - prompt.left
        ends = (*prompt.borders, self.quantised, prompt.tokens - 1)
        stop = min((each for each in ends if each > done), default=prompt.tokens)
        length = 1 if is_last else min(self.chunk, stop - done)
        item = Item(
            ItemKind.PREFILL,
            (prompt.number,),
            length,
            samples=is_last,
            prefix=prefix,
            border=stop if done + length == stop in prompt.borders else 0,
            params=None if prompt.is_known else prompt.params,
            **self._take_ended(),
        )
        prompt.is_known, prompt.awaits = True, is_last
        prompt.left -= length
        if prompt.left <= 1:
            self._current = None
        if prompt.left == 1:
            self._join(prompt.number)
        return item

    def _join(self, sequence: int) -> None:
        smallest = min(self._groups, key=lambda group: (group.size, group.in_flight))
        smallest.joining.append(sequence)

    def _take_ended(self) -> dict[str, Any]:
        """Return what an item says of sequences that have left, and forget it."""
        left = {"kept": self._kept, "dropped": self._dropped, "put_back": self._put_back}
        self._kept, self._dropped, self._put_back = [], [], []
        return {name: tuple(sequences) for name, sequences in left.items()}
