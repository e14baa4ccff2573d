"""Stages without a model: what a sequence's caches hold decides its next token.

They do what is announced as real stages do, and refuse what those would refuse or would do wrongly.
A text is a function of its prompt, its seed and its adapter (``Text``), so a token that entered
too much, too little or in another place changes what follows.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import Handle
from shardmlx.inference.commands import (
    Begin,
    Border,
    Command,
    Commands,
    Decode,
    Drop,
    Item,
    Keep,
    Prefill,
    PutBack,
    Reject,
    Stop,
)
from shardmlx.inference.drafts import accepted
from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.models.sizes.kv_cache import held

VOCABULARY = 6
STOP = 0
"""The token that ends a text."""

_PRIME = 1_000_003
_MASK = 2**61 - 1


def _mixed(state: int, number: int) -> int:
    return (state * _PRIME + number + 1) & _MASK


@dataclass(frozen=True)
class Kind:
    """What caches can do: of fewer than ``cuttable`` tokens they can be cut anywhere, with 0 none
    can, as states of recurrent layers; those of ``quantised`` tokens and more are quantised, if
    that is not 0."""

    cuttable: int = 2**31
    quantised: int = 0


@dataclass
class Cache:
    """What a stage keeps of a sequence: its tokens, and after each what a model would compute."""

    start: int
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    is_quantised: bool = False
    is_stepped: bool = False
    """True if the last token entered alone, in a decode step: any cache can give it back."""
    borders: frozenset[int] = frozenset()

    def quantise(self, kind: Kind) -> None:
        """Quantise what has come to the length for it."""
        if kind.quantised and len(self.tokens) >= kind.quantised:
            self.is_quantised = True

    def enter(self, *tokens: int) -> None:
        """Let tokens enter, each of which sees all that entered before."""
        state = self.states[-1] if self.states else self.start
        for token in tokens:
            state = _mixed(state, 2 * token + self.is_quantised)
            self.states.append(state)
        self.tokens.extend(tokens)

    def cut(self, count: int) -> None:
        """Forget the last tokens."""
        del self.tokens[len(self.tokens) - count :]
        del self.states[len(self.states) - count :]

    def next(self, seed: int) -> int:
        """Return the token that follows. Most texts repeat themselves, and few end early."""
        drawn = _mixed(self.states[-1], seed) >> 20
        if drawn % 7 == 0:
            return drawn // 7 % VOCABULARY
        last = self.tokens[-1]
        before = self.tokens[-2] if len(self.tokens) > 1 else 0
        return 1 + (last + 2 * before + seed) % (VOCABULARY - 1)


class Text:
    """The text that follows a prompt, when nothing else is computed."""

    def __init__(self, prompt: Sequence[int], seed: int, adapter: int, kind: Kind) -> None:
        self._cache = Cache(adapter)
        self._seed = seed
        self._kind = kind
        self._prompt = len(prompt)
        whole = kind.quantised or len(prompt)
        self._cache.enter(*prompt[:whole])
        self._cache.quantise(kind)
        self._cache.enter(*prompt[whole:])

    def _enter(self, token: int) -> None:
        self._cache.quantise(self._kind)
        self._cache.enter(token)

    def token(self, place: int) -> int:
        """Return the token at a place after the prompt."""
        return self.tokens(place + 1)[place]

    def tokens(self, count: int) -> list[int]:
        """Return the first tokens after the prompt."""
        while len(self._cache.tokens) < self._prompt + count:
            self._enter(self._cache.next(self._seed))
        return self._cache.tokens[self._prompt : self._prompt + count]


@dataclass
class Graph:
    """An item under way: its ``outputs`` are tokens, a row for each that is sampled."""

    item: Item
    inputs: mx.array
    outputs: mx.array
    is_sampled: bool = True
    tokens: np.ndarray | None = None


@dataclass
class Stages:
    """All stages of a pipeline, in the place of a first stage's ``StageWorker``.

    ``random`` draws how long an item takes in ``stages``. With a ``head`` the last one guesses.
    Open sequences and kept ones have room for ``capacity`` tokens, if that is a number. ``clock``
    counts steps.
    """

    random: Random
    stages: int
    kind: Kind
    most: int
    capacity: int | None = None
    head: bool = False
    clock: int = 0

    files = None
    shares_tokens = False

    def __post_init__(self) -> None:
        self.last = self.stages - 1
        self.part = SimpleNamespace(is_first=True, is_last=self.last == 0)
        self.runs_ahead = self.last == 0 and not self.head
        self.item: Item | None = None
        self.caches = SimpleNamespace(remember=False)
        self.outbox = SimpleNamespace(drain=lambda most: None)
        self.transport = self
        self.held: dict[int, Cache] = {}
        """The caches of all sequences, kept ones among them."""
        self.kept: set[int] = set()
        self.sampled: dict[int, SamplingParams] = {}
        """What the sampler knows of sequences that have begun."""
        self._adapters: dict[int, int] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._announced: deque[Commands] = deque()
        self._results: deque[np.ndarray] = deque()
        self._coming: deque[tuple[int, Handle, np.ndarray]] = deque()
        self._has_stopped = False

    # What is announced

    def begin(self, item: Item | None) -> None:
        """Begin an item, or wait for one."""
        self.item = item

    def announce(self, commands: Commands) -> None:
        """Tell all stages what comes next."""
        self._announced.append(commands)
        if commands == (Stop(),):
            assert not self._coming, "nothing is under way when all stop"
            self._announced.popleft()

    def do(self, commands: Commands) -> None:
        """Do what commands say of which none computes."""
        assert self._announced.popleft() == commands, "it was announced"
        for command in commands:
            self.apply(command)

    def retract(self) -> None:
        """Forget what was foreseen: here nothing is."""

    def foresee(self, likely: Decode) -> None:
        """Foresee nothing."""

    def foresee_next(self, item: Item) -> None:
        """Foresee nothing of a group's next step, either."""

    def foreseen_by(self, commands: Commands) -> None:
        """Return None, as if nothing had been foreseen."""

    def graph_of(self, commands: Commands, inputs: mx.array, *, is_ahead: bool = False) -> Graph:
        """Do what commands say, and compute the item among them."""
        graph: Graph | None = None
        assert self._announced.popleft() == commands, "it was announced"
        for command in commands:
            if isinstance(command, (Prefill, Decode)):
                graph = self._computed(command, inputs, is_ahead=is_ahead)
            else:
                self.apply(command)
        assert graph is not None, "there is an item"
        self._check_room()
        return graph

    def _computed(self, item: Item, inputs: mx.array, *, is_ahead: bool) -> Graph:
        rows: list[list[int]] = np.array(inputs).tolist()
        assert [len(row) for row in rows] == [item.length] * len(item.sequences)
        if isinstance(item, Prefill):
            assert item.sequence not in self._in_groups(), "a prompt that is in a group"
        else:
            self._join(item)
        sampled = self._entered(item, rows)
        if self.last and item.samples:
            self._results.append(np.array(sampled, np.int32))
        waits = is_ahead and any(self.sampled[each].grammar for each in item.sequences)
        outputs = mx.array(sampled, mx.int32) if item.samples else inputs
        return Graph(item, inputs, outputs, is_sampled=not waits)

    def apply(self, command: Command) -> None:
        """Do what a command says that computes nothing."""
        match command:
            case Begin():
                self._begin(command)
            case Reject(sequence, count):
                assert sequence not in self.kept
                shared = [each for each in self._groups.values() if sequence in each]
                assert shared in ([], [(sequence,)]), "others share its caches"
                self._cut(sequence, count)
            case Keep(sequences, cuts):
                self._leave(sequences)
                for sequence, count in zip(sequences, cuts, strict=True):
                    del self.sampled[sequence], self._adapters[sequence]
                    if count:
                        self._cut(sequence, count)
                    self.held[sequence].quantise(self.kind)
                    self.kept.add(sequence)
            case PutBack(sequences):
                self._drop(sequences)
            case Drop(sequences):
                self._drop(sequences)
                for sequence in sequences:
                    self.sampled.pop(sequence, None)
                    self._adapters.pop(sequence, None)
                    self.kept.discard(sequence)
            case Border(sequence, tokens):
                cache = self.held[sequence]
                assert len(cache.tokens) == tokens, "a border is where a chunk ends"
                cache.borders |= {tokens}

    def _begin(self, told: Begin) -> None:
        sequence = told.sequence
        assert sequence not in self.held, "it begins with no caches"
        assert (told.params is None) == (sequence in self.sampled), "it has begun before"
        if told.params is not None:
            self.sampled[sequence] = told.params
        self._adapters[sequence] = told.adapter
        if told.prefix is None:
            self.held[sequence] = Cache(told.adapter)
        else:
            self.held[sequence] = self._taken(told.prefix)
            assert self.held[sequence].start == told.adapter, "caches of another adapter"

    def _taken(self, prefix: CachedPrefix) -> Cache:
        assert prefix.sequence in self.kept
        whole = self.held[prefix.sequence]
        assert whole.borders >= set(prefix.borders)
        if prefix.is_whole:
            assert len(whole.tokens) == prefix.length
            self.kept.discard(prefix.sequence)
            whole.borders = frozenset(prefix.borders)
            return self.held.pop(prefix.sequence)
        cuttable = len(whole.tokens) < self.kind.cuttable
        assert cuttable or prefix.length in whole.borders, "caches that cannot be cut there"
        tokens, states = whole.tokens[: prefix.length], whole.states[: prefix.length]
        borders = frozenset(prefix.borders)
        return Cache(whole.start, tokens, states, whole.is_quantised, borders=borders)

    def _cut(self, sequence: int, count: int) -> None:
        cache = self.held[sequence]
        # A ring still has all that its last token took the place of.
        is_ring = self.kind.cuttable > 0
        remembers = is_ring or (cache.is_stepped and self.caches.remember)
        assert (count == 1 and remembers) or len(cache.tokens) < self.kind.cuttable, (
            f"cannot give back {count} tokens"
        )
        cache.cut(count)
        cache.is_stepped = False

    def _drop(self, sequences: Collection[int]) -> None:
        self._leave(sequences)
        for sequence in sequences:
            self.held.pop(sequence, None)

    def _leave(self, sequences: Collection[int]) -> None:
        for number, group in list(self._groups.items()):
            self._groups[number] = tuple(each for each in group if each not in sequences)
            if not self._groups[number]:
                del self._groups[number]

    # What is computed

    def _in_groups(self) -> set[int]:
        return {sequence for group in self._groups.values() for sequence in group}

    def _join(self, item: Decode) -> None:
        before = self._groups.pop(item.group, ())
        assert item.sequences[: len(before)] == before, f"a group of {before} is to be {item}"
        joining = item.sequences[len(before) :]
        assert not self._in_groups().intersection(joining), "a sequence in two groups"
        adapters = {self._adapters[each] for each in item.sequences}
        assert len(adapters) == 1, "a group of several adapters"
        assert not self.kind.quantised or len(item.sequences) == 1
        self._groups[item.group] = item.sequences

    def _entered(self, item: Item, rows: list[list[int]]) -> list[list[int]]:
        """Let tokens enter; return those that are sampled, a row each, and what a head guesses."""
        sampled = []
        for sequence, row in zip(item.sequences, rows, strict=True):
            assert sequence not in self.kept
            cache = self.held[sequence]
            cache.quantise(self.kind)
            seed = self.sampled[sequence].stream
            if item.samples:
                for token in row:
                    cache.enter(token)
                    sampled.append([cache.next(seed)])
            else:
                cache.enter(*row)
            cache.is_stepped = isinstance(item, Decode) and len(row) == 1
        if isinstance(item, Decode) and item.guesses:
            sampled += self._guesses(item, [token for (token,) in sampled])
        return sampled

    def _guesses(self, item: Decode, sampled: list[int]) -> list[list[int]]:
        assert self.head
        cache = self.held[item.sequences[0]]
        right = accepted(item.drafts, sampled)
        wrong = len(item.drafts) - right
        after = Cache(cache.start, [*cache.tokens], [*cache.states], cache.is_quantised)
        after.cut(wrong)
        after.enter(sampled[right])
        guesses = []
        for _ in range(item.guesses):
            guess = after.next(self.sampled[item.sequences[0]].stream)
            if self.random.random() < 0.3:
                guess = self.random.randrange(VOCABULARY)
            guesses.append([guess])
            after.enter(guess)
        return guesses

    def _check_room(self) -> None:
        """Raise ``AssertionError`` if there are more sequences or tokens than there is room for."""
        lengths = [
            len(each.tokens) for number, each in self.held.items() if number not in self.kept
        ]
        assert len(lengths) <= self.most
        if self.capacity is not None:
            kept = sum(held(len(self.held[number].tokens)) for number in self.kept)
            assert kept + len(lengths) * held(max(lengths, default=0)) <= self.capacity

    # What comes of it

    def start(self, graph: Graph) -> None:
        """Begin to compute: here all is computed already."""

    def sample_late(self, graph: Graph, void: Collection[int]) -> None:
        """Sample what had to wait for the tokens before."""
        graph.is_sampled = True

    def finish(self, graph: Graph) -> None:
        """Wait until a graph is computed."""
        if graph.item.samples and not self.last:
            assert graph.is_sampled, "its tokens were not sampled"
            graph.tokens = np.array(graph.outputs)

    def pass_on(self, graph: Graph) -> None:
        """Send what was computed on its way."""

    def receive(self, array: np.ndarray, peer: int, tag: int) -> Handle:
        """Begin to receive the tokens of the item that was begun last, which come in order."""
        handle = Handle(array)
        due = self.clock + self.random.randint(self.stages - 1, 2 * self.stages)
        if self._coming:
            due = max(due, self._coming[-1][0])
        self._coming.append((due, handle, self._results.popleft()))
        return handle

    def has_come(self, handle: Handle) -> bool:
        """Return whether tokens have come by now."""
        while self._coming and self._coming[0][0] <= self.clock:
            _, come, tokens = self._coming.popleft()
            come.array[:] = tokens
            come.done = True
        return handle.done

    def wait(self, handle: Handle, peer: int) -> None:
        """Wait for tokens: time goes on until they have come."""
        while not self.has_come(handle):
            self.clock += 1

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise errors as they are."""
        yield
