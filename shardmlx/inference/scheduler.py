"""Schedule chunked prefill and decode of many sequences. No MLX, no MPI.

The first rank decides, one item at a time, and every stage computes the items in that order::

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

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardmlx.inference.commands import (
    NO_ADAPTER,
    Begin,
    Border,
    Command,
    Commands,
    Decode,
    Item,
    News,
    Prefill,
)
from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.models.sizes.kv_cache import STEP, held


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The ``prefix`` of a prompt that is kept, if one is. Chunks also end at ``borders``, and the
    sequences that are ``forgotten`` make room for it."""

    prefix: CachedPrefix | None = None
    borders: Sequence[int] = ()
    forgotten: Sequence[int] = ()


NOTHING_FOUND = FoundPrefix()


@dataclass(slots=True)
class _Sequence:
    """A sequence of so many ``tokens``, of which ``left`` are still to be computed as a prompt, and
    which may become ``context``. Stages get its ``params`` with its first chunk alone. It is
    computed by an ``adapter``."""

    number: int
    tokens: int
    left: int
    context: int
    params: SamplingParams | None
    adapter: int = NO_ADAPTER
    borders: Sequence[int] = ()
    is_known: bool = False
    awaits: bool = False

    @property
    def room(self) -> int:
        """Tokens of its caches with the next one: mlx-lm's grow by a step from where they are."""
        return min(held(self.tokens) + STEP, held(self.context))


@dataclass(slots=True)
class _DecodeGroup:
    """Sequences of one ``adapter`` that advance together. ``in_flight`` while a token of them is
    being computed."""

    adapter: int = NO_ADAPTER
    sequences: list[int] = field(default_factory=list)
    joining: list[int] = field(default_factory=list)
    in_flight: bool = False

    @property
    def size(self) -> int:
        """The number of sequences, those that join with the next step too."""
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
    come. ``news`` are told with the next item. Sequences of several adapters take turns: where
    these are more than ``groups``, so are the groups.
    """

    groups: int
    most: int
    chunk: int
    patience: int | None = None
    capacity: int | None = None
    quantised: int = 0
    find_prefix: Callable[[int], FoundPrefix] = lambda _: NOTHING_FOUND
    news: News = field(default_factory=News)

    def __post_init__(self) -> None:
        self._chunks_since = 0
        self._groups = [_DecodeGroup() for _ in range(self.groups)]
        self._turns = deque(range(self.groups))
        # In order; by number, since any of thousands may be given up.
        self._waiting: OrderedDict[int, _Sequence] = OrderedDict()
        self._current: _Sequence | None = None
        self._open: dict[int, _Sequence] = {}

    @property
    def is_idle(self) -> bool:
        """True if no sequence is under way, and none waits."""
        return not self._open and not self._waiting

    @property
    def reserved(self) -> int:
        """Tokens of cache that are taken with the next token of each: a sequence counts as long as
        the longest, since those of a group are padded."""
        return len(self._open) * max((each.room for each in self._open.values()), default=0)

    def add(
        self,
        sequence: int,
        tokens: int,
        params: SamplingParams | None = None,
        context: int = 0,
        adapter: int = NO_ADAPTER,
    ) -> None:
        """Queue a prompt of so many tokens, which may become ``context``, by an ``adapter``. Raises
        ``ValueError`` if it has none, or would never have room in ``capacity``."""
        if tokens < 1:
            raise ValueError(f"a prompt of {tokens} tokens")
        if self.capacity is not None and held(context) > self.capacity:
            raise ValueError(f"a sequence of {context} tokens, where {self.capacity} are kept")
        self._waiting[sequence] = _Sequence(sequence, tokens, tokens, context, params, adapter)

    @property
    def has_prompt(self) -> bool:
        """True if a chunk of a prompt may come next."""
        return self._next_prompt() is not None

    def next(self) -> Commands | None:
        """Return what the pipeline does next, with the news; None while that depends on items under
        way."""
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
        group = self._groups[ready]
        group.sequences += group.joining
        group.joining = []
        return *self.news.take(), self.begin(Decode(tuple(group.sequences), ready))

    def begin(self, item: Decode) -> Decode:
        """Note that a decode step of a group is under way, and return it."""
        self._turns.remove(item.group)
        self._turns.append(item.group)
        self._groups[item.group].in_flight = True
        for sequence in item.sequences:
            self._open[sequence].awaits = True
        return item

    def foreseen(self) -> Decode | None:
        """Guess the next item where ``next`` has none: the decode step of the group that has been
        under way longest, which comes if no sequence joins or leaves it."""
        longest = next((g for g in self._turns if self._groups[g].size), None)
        if self._next_prompt() is not None or longest is None or not self._has_room:
            return None
        group = self._groups[longest]
        if group.joining or not group.in_flight:
            return None
        return Decode(tuple(group.sequences), longest)

    def returned(self, item: Item, tokens: int = 1, *, goes_on: bool = False) -> None:
        """Note that so many ``tokens`` of each sequence of an item have been sampled, of those that
        have not left. If it ``goes_on``, others of its group are under way."""
        staying = [sequence for sequence in item.sequences if sequence in self._open]
        if not staying:
            return
        for sequence in staying:
            self._open[sequence].tokens += tokens
            self._open[sequence].awaits = goes_on
        if isinstance(item, Prefill):
            self._join(item.sequence)
        else:
            self._groups[item.group].in_flight = goes_on

    def finish(self, sequence: int, *, keep: bool = False, cut: int = 0) -> bool:
        """End a sequence, even before its prefill has begun: what is under way of it comes in vain.
        The stages drop its caches, or ``keep`` them but for the last tokens that are ``cut``.
        Return whether they keep any."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None:
            if waiting.is_known:  # it was put back: there is its sampling state
                self.news.drop(sequence)
            return False
        self._take_out(sequence)
        if keep:
            self.news.keep(sequence, cut)
        else:
            self.news.drop(sequence)
        return keep

    @property
    def _has_room(self) -> bool:
        return self.capacity is None or self.reserved <= self.capacity

    def _make_room(self) -> bool:
        """Put back the sequences without room; return False where one awaits a token first."""
        while not self._has_room:
            # Never the first: it has room for all that it may become.
            last = next(reversed(self._open))
            if self._open[last].awaits:
                return False
            sequence = self._take_out(last)
            sequence.left = sequence.tokens
            self._waiting[last] = sequence
            self._waiting.move_to_end(last, last=False)
            self.news.put_back(last)
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
            prompt = next(iter(self._waiting.values()))
            self._open[prompt.number] = prompt
            if self._has_room:
                self._current = self._waiting.pop(prompt.number)
            else:
                del self._open[prompt.number]
        return self._current

    def _chunk_of(self, prompt: _Sequence) -> Commands:
        begin: Begin | None = None
        if prompt.left == prompt.tokens:
            begin = self._begin(prompt)
        # The first token is sampled from the prompt's last one, as in mlx-lm: in the group's next
        # decode step, or in a chunk of its own where nothing else of the prompt is to be computed.
        is_last = prompt.left == 1
        done = prompt.tokens - prompt.left
        ends = (*prompt.borders, self.quantised, prompt.tokens - 1)
        stop = min((each for each in ends if each > done), default=prompt.tokens)
        length = 1 if is_last else min(self.chunk, stop - done)
        told: list[Command] = [*self.news.take(begin), Prefill(prompt.number, length, is_last)]
        if done + length == stop in prompt.borders:
            told.append(Border(prompt.number, stop))
        prompt.is_known = True
        prompt.awaits = is_last
        prompt.left -= length
        if prompt.left <= 1:
            self._current = None
        if prompt.left == 1:
            self._join(prompt.number)
        return tuple(told)

    def _begin(self, prompt: _Sequence) -> Begin:
        """Return the beginning of a prompt. Its prefix is looked for now, and not when its turn
        has come: the sequences that are forgotten for it go with this item."""
        found = self.find_prefix(prompt.number)
        prompt.borders = found.borders
        prompt.left -= found.prefix.length if found.prefix is not None else 0
        for sequence in found.forgotten:
            self.news.drop(sequence)
        params = None if prompt.is_known else prompt.params
        return Begin(prompt.number, params, found.prefix, prompt.adapter)

    def _join(self, sequence: int) -> None:
        adapter = self._open[sequence].adapter
        fitting = [each for each in self._groups if not each.size or each.adapter == adapter]
        if not fitting:
            fitting = [_DecodeGroup()]
            self._turns.append(len(self._groups))
            self._groups += fitting
        smallest = min(fitting, key=lambda group: (group.size, group.in_flight))
        smallest.adapter = adapter
        smallest.joining.append(sequence)
