"""A worker that computes items of generation, on every rank, whichever stage it has."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.compat import begin_evaluation
from shardmlx.distributed.messages import (
    Handle,
    PeerLost,
    TransportError,
    copy_into,
    new_buffer,
)
from shardmlx.distributed.mlx_group import losses_named
from shardmlx.distributed.tags import FIRST_ENGINE_TAG
from shardmlx.distributed.transport import Outbox, Transport
from shardmlx.errors import EngineError, one_line
from shardmlx.inference.adapters import Adapters
from shardmlx.inference.announcements import Announcer
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
    RestoreKept,
    StoreKept,
)
from shardmlx.inference.drafts import accepted
from shardmlx.inference.kv_caches import Backup, Caches, KVCaches
from shardmlx.inference.prefix_files import PrefixFiles
from shardmlx.inference.route import TokenRoute
from shardmlx.inference.sampler import BatchSampler
from shardmlx.models.runtime.draft_head import DraftHead
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.mesh import Mesh

HIDDEN_TAG = FIRST_ENGINE_TAG + 1
TOKENS_TAG = FIRST_ENGINE_TAG + 2

UNSENT = 6
"""Messages that a rank may leave unsent when it begins the next item."""

SECONDS_AWAKE = 0.2
"""Seconds of polling, more than a decode step takes a stage; then it waits as transports do."""

STATES_EVERY = 32
"""Steps after which the states of all caches are evaluated."""

DUE = 0.9
"""A message is due after this fraction of the shortest of the last waits."""

NAP, PAUSE = 1e-3, 5e-5
"""Seconds between two polls before a message is due, and from then on: where there are no more
cores than ranks, polling takes time from the core that computes the message (measured)."""


@dataclass(slots=True)
class ItemGraph:
    """The lazy graph of an item on this stage: ``inputs`` are a buffer to fill before
    ``evaluated`` is evaluated, or tokens that may be lazy. While it may be taken back there is a
    ``backup`` of the caches. ``states`` are hidden states after the layers. Once a graph that
    samples is evaluated on the last stage, ``tokens`` are what the sampler returned, with the
    guesses of the model's head in further rows."""

    item: Item
    inputs: mx.array
    states: mx.array
    outputs: mx.array
    evaluated: list[Any]
    caches: Caches
    backup: Backup | None = None
    is_sampled: bool = False
    tokens: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """The inputs of an item that are on their way, and their receive."""

    inputs: mx.array
    handle: Handle


@dataclass
class StageWorker:
    """A rank's part in a ``hop`` of generation, held by the stage that says what is next: without a
    ``route`` rank i has stage i, and without a number the hop is the rank's first on it.

    ``part`` holds the layers of the hop. The first rank of those that share the last one samples,
    by its ``sampler``. Without shares it has the model's ``head`` if that drafts: the last of
    ``caches`` is then the head's. Kept sequences have ``files`` where they outlive the job.
    ``item`` is at work now: errors name it. ``adapters`` are those by which sequences are computed.
    """

    transport: Transport
    part: Slice
    caches: KVCaches
    sampler: BatchSampler
    files: PrefixFiles | None = None
    head: DraftHead | None = None
    item: Item | None = None
    route: TokenRoute | None = None
    hop: int | None = None
    adapters: Adapters = field(init=False)
    announcer: Announcer = field(init=False)

    def __post_init__(self) -> None:
        rank = self.transport.rank
        route = self.route or TokenRoute.of(Mesh(1, self.transport.size))
        mesh = route.mesh
        number = route.numbers(rank)[0] if self.hop is None else self.hop
        self.adapters = Adapters(self.part)
        self.last = route.end  # which samples
        self.giver = route.giver(number, rank)
        """The rank that gives this one the inputs of its items, unless this is rank 0's first hop,
        into which tokens go."""
        self._taker = None if self.part.is_last else route.taker(number, rank)
        self._name = str(route.hops[number])
        self._sharing = mesh.sharing(rank)
        self._is_last = self.part.is_last and rank == self.last
        self.shares_tokens = len(self._sharing) > 1
        """True if other ranks share this one's stage, and need the tokens that enter it."""
        self.runs_ahead = mesh.size == 1 and self.head is None
        """True if this rank samples what it reads next: a step can begin with tokens that nobody
        has read. The head reads them first, and so do ranks that share the stage: MLX waits for
        their part of a sum before it returns from what was to run ahead."""
        self._is_whole = self.part.is_first and self.part.is_last and self.runs_ahead
        self._steps = 0
        self.outbox = Outbox(self.transport)
        self.announcer = Announcer(self.outbox, mesh.size)
        self._foreseen: dict[int, ItemGraph] = {}
        self._waits: deque[float] = deque([0.0], maxlen=4)

    def begin(self, item: Item | None) -> None:
        """Begin an item, or wait for one. Raises what transports raise if a rank is lost."""
        self.item = item
        self.transport.activity.begin(self._doing if item else "generating")
        self.transport.activity.check(self._who)

    def new_inputs(self, item: Item) -> mx.array:
        """Return a buffer for an item's token ids, or hidden states, to be filled."""
        shape = len(item.sequences), item.length
        if self.part.is_first:
            return mx.array(np.zeros(shape, np.int32))  # evaluated, whatever is being computed
        return new_buffer((*shape, self.part.hidden_size), self.part.dtype)

    def apply(self, command: Command) -> None:
        """Do what a command says that computes nothing."""
        match command:
            case Reject():
                self.caches.cut(command.sequence, command.count)
            case Keep():
                self.sampler.close(command.sequences)
                self.adapters.close(command.sequences)
                self.caches.keep(command)
            case PutBack():
                self.caches.drop(command.sequences)
            case Drop():
                self.sampler.close(command.sequences)
                self.adapters.close(command.sequences)
                self.caches.drop(command.sequences)
            case Begin():
                self.adapters.begin(command)
                self.caches.begin(command)
                if command.params is not None and self._is_last:
                    self.sampler.open(command.sequence, command.params)
            case Border():
                self.caches.keep_border(command)
            case RestoreKept() | StoreKept() if self.files is not None:
                self._use_files(self.files, command)

    def _use_files(self, files: PrefixFiles, command: RestoreKept | StoreKept) -> None:
        if isinstance(command, StoreKept):
            files.mirror({key: self.caches.kept(each) for each, key in command.kept})
            return
        for sequence, key in command.kept:
            self.caches.restore(sequence, files.read(key))

    def do(self, commands: Commands) -> None:
        """Do what ``commands`` say of which none computes."""
        self.retract()
        for command in commands:
            self.apply(command)

    def graph_of(
        self, commands: Commands, inputs: mx.array | None = None, *, is_ahead: bool = False
    ) -> ItemGraph:
        """Do what ``commands`` say, and return the graph of the item among them: the one that was
        foreseen, or one with these ``inputs``, or else with a buffer to fill. If it ``is_ahead``,
        nobody knows the inputs yet."""
        if len(commands) > 1:
            self.retract()
        graph: ItemGraph | None = None
        for command in commands:
            if isinstance(command, (Prefill, Decode)):
                graph = self._taken(command) or self.build(command, inputs, is_ahead=is_ahead)
            else:
                self.apply(command)
        assert graph is not None, "there is an item"
        return graph

    def build(
        self,
        item: Item,
        inputs: mx.array | None = None,
        *,
        is_foreseen: bool = False,
        is_ahead: bool = False,
    ) -> ItemGraph:
        """Build the graph of an item, to be computed later. That of one which ``is_foreseen``, and
        may not come, has a backup, and is to ``sample`` when the tokens before are known; so is one
        that ``is_ahead`` of them, where grammars ask for them."""
        if inputs is None:
            inputs = self.new_inputs(item)
        caches = self.caches.of(item)
        of_layers = caches if self.head is None else caches[:-1]
        backup = Backup(of_layers) if is_foreseen else None
        with self.adapters.of(item.sequences) as part:
            if self._is_whole and item.samples and item.length == 1:
                logits = part.step(inputs, of_layers)
                graph = ItemGraph(item, inputs, logits, logits, self._due(of_layers), caches)
                return self._sampled(graph, is_ahead=is_ahead)
            states = outputs = part.extend(inputs, of_layers)
            if self._is_last and item.samples:
                outputs = part.last_logits(states, item.length)
        if self.head is not None and isinstance(item, Prefill) and not item.samples:
            self.head.enter(mx.array([item.following]), states, caches[-1])
        # The next chunk needs all keys and values, and nothing else of the last layer.
        evaluated = self._due(of_layers) if item.samples else [cache.state for cache in caches]
        if not self._is_last and (item.samples or not self.part.is_last):
            outputs = mx.contiguous(outputs)
            evaluated.append(outputs)
        graph = ItemGraph(item, inputs, states, outputs, evaluated, caches, backup)
        return graph if is_foreseen else self._sampled(graph, is_ahead=is_ahead)

    def _sampled(self, graph: ItemGraph, *, is_ahead: bool) -> ItemGraph:
        if not (is_ahead and self.sampler.needs_tokens(graph.item.sequences)):
            self.sample(graph)
        return graph

    def _due(self, caches: Caches) -> list[Any]:
        """Return the states of caches that are to be evaluated with a step: now and then all. A
        layer's output evaluates most; some count tokens alone, and would grow lazily."""
        self._steps += 1
        return [cache.state for cache in caches] if self._steps % STATES_EVERY == 0 else []

    def foresee(self, likely: Decode) -> None:
        """Build the graph of the item that likely comes next of a group, unless there is one."""
        if likely.group not in self._foreseen:
            self._foreseen[likely.group] = self.build(likely, is_foreseen=True)

    def foresee_next(self, item: Item) -> None:
        """Build the graph of the next step of an item's group, while its tokens are on their way.
        After a round with drafts it depends on how many were right."""
        if isinstance(item, Decode) and item.is_plain:
            self.foresee(Decode(item.sequences, item.group))

    def foreseen_by(self, commands: Commands) -> ItemGraph | None:
        """Return the graph of what comes next, if this was foreseen."""
        item = commands[0] if len(commands) == 1 else None
        graph = self._foreseen.get(item.group) if isinstance(item, Decode) else None
        if graph is None or not isinstance(item, Decode):
            return None
        is_same = graph.item.sequences == item.sequences and graph.item.length == item.length
        return graph if is_same else None

    def _taken(self, item: Item) -> ItemGraph | None:
        """Return the graph of an item that was foreseen; forget another one of its group."""
        if not isinstance(item, Decode):
            return None
        graph = self.foreseen_by((item,))
        other = self._foreseen.pop(item.group, None)
        if graph is None:
            _take_back(other)
            return None
        graph.item = item
        self.sample(graph)
        return graph

    def retract(self) -> None:
        """Forget what was foreseen."""
        for graph in self._foreseen.values():
            _take_back(graph)
        self._foreseen.clear()

    def sample(self, graph: ItemGraph, void: Collection[int] = ()) -> None:
        """Have the last stage's graph of an item that samples end in tokens, no longer in logits:
        they depend on the tokens before in penalties, grammars and random streams. Tokens of
        sequences in ``void`` do not matter."""
        item = graph.item
        if not (self._is_last and item.samples):
            return
        drafts = item.drafts if isinstance(item, Decode) else ()
        is_sure = not isinstance(item, Decode) or item.guess is None
        graph.outputs = self.sampler.sample(
            item.sequences, graph.outputs, drafts, is_sure=is_sure, void=void
        )
        graph.evaluated.append(graph.outputs)
        graph.is_sampled = True

    def sample_late(self, graph: ItemGraph, void: Collection[int]) -> None:
        """Sample the tokens of a graph that has been started, if they had to wait for the ones
        before."""
        if not graph.is_sampled and graph.item.samples:
            self.sample(graph, void)
            self.start(graph)

    def start(self, graph: ItemGraph) -> None:
        """Begin to evaluate a graph whose inputs are filled; it cannot be taken back any more."""
        # MLX writes in place only into an array that nobody else holds: when it evaluates this
        # step, and when it evaluates the next one.
        graph.backup = None
        evaluated = graph.evaluated
        if not graph.is_sampled and self._is_last and graph.item.samples:
            evaluated = [*evaluated, graph.outputs]
        graph.evaluated = []
        begin_evaluation(evaluated)

    def finish(self, graph: ItemGraph) -> None:
        """Wait until a graph is evaluated."""
        item = graph.item
        if not item.samples:
            states = [cache.state for cache in graph.caches]
            mx.eval(states if self.part.is_last else [states, graph.outputs])
            return
        # No caches: by now they may hold arrays of a foreseen graph, whose inputs are not filled.
        if not self._is_last:
            mx.eval(graph.outputs)
            return
        graph.tokens = np.array(graph.outputs).view(np.int32)
        drafts = item.drafts if isinstance(item, Decode) else ()
        guess = item.guess if isinstance(item, Decode) else None
        tokens = graph.tokens[:, 0].tolist()
        self.sampler.settle(item.sequences, tokens, drafts, guess)
        if self.head is not None:
            self._guess(self.head, graph, tokens, drafts)

    def _guess(
        self, head: DraftHead, graph: ItemGraph, tokens: list[int], drafts: tuple[int, ...]
    ) -> None:
        """Let the head read the sampled ``tokens``; have those that it guesses follow them."""
        item = graph.item
        cache = graph.caches[-1]
        following = mx.array(tokens).reshape(graph.states.shape[:2])
        states = head.enter(following, graph.states, cache)
        guesses = item.guesses if isinstance(item, Decode) else 0
        if not guesses:
            begin_evaluation(cache.state)
            return
        right = accepted(drafts, tokens)
        wrong = len(drafts) - right
        cache.trim(wrong)
        guessed = head.guess(states[:, right : right + 1], guesses, cache)
        # It stays as long as the layers' caches, which are cut with the next item.
        cache.trim(guesses - 1 - wrong)
        begin_evaluation(guessed, cache.state)
        assert graph.tokens is not None, "they have been sampled"
        rows = np.zeros((guesses, graph.tokens.shape[1]), np.int32)
        rows[:, 0] = np.array(guessed)
        graph.tokens = np.concatenate([graph.tokens, rows])

    def pass_on(self, graph: ItemGraph) -> None:
        """Send hidden states to the next stage, or sampled tokens from the last one to rank 0, and
        forget messages that have been sent."""
        if self._taker is not None:
            self.outbox.send(graph.outputs, self._taker, HIDDEN_TAG, self._doing())
        elif graph.tokens is not None and self.last:
            self.outbox.send(graph.tokens, 0, TOKENS_TAG, self._doing())
        self.outbox.drain(UNSENT)

    def share_tokens(self, tokens: np.ndarray) -> None:
        """Send the first stage's token ids to the other ranks that share it."""
        for peer in self._sharing[1:]:
            self.outbox.send(tokens, peer, HIDDEN_TAG, self._doing())

    def expect(self, commands: Commands, item: Item, *, is_next: bool = True) -> Expected:
        """Begin to receive the inputs of an item: into the graph that was foreseen, if it
        ``is_next`` and no other item may have that forgotten."""
        graph = self.foreseen_by(commands) if is_next else None
        inputs = self.new_inputs(item) if graph is None else graph.inputs
        return Expected(inputs, self.transport.receive(inputs, self.giver, HIDDEN_TAG))

    def start_with(self, graph: ItemGraph, expected: Expected) -> None:
        """Begin to evaluate a graph once its inputs have come."""
        self.wait(expected.handle, self.giver)
        if graph.inputs is not expected.inputs:
            copy_into(graph.inputs, expected.inputs)
        self.start(graph)

    def announce(self, commands: Commands) -> None:
        """Tell the next rank, if there is one, what comes next."""
        if self.announcer.size > 1:
            self.announcer.announce(commands, self._doing())

    def heard(self, announcement: Handle) -> Commands:
        """Return what an announcement says whose number has come, and pass it on."""
        return self.announcer.heard(announcement, self._who)

    def wait(self, handle: Handle, peer: int) -> None:
        """Wait for a message from ``peer``: poll rarely until it is due, judging by the last
        waits, then often, as a decode step takes milliseconds. Raises as ``Transport.wait``."""
        begin = now = time.monotonic()
        due = begin + DUE * min(self._waits)
        while now < begin + SECONDS_AWAKE and self.transport.activity.failure is None:
            try:
                if self.has_come(handle):
                    self._waits.append(now - begin)
                    return
            except PeerLost:
                break  # the wait below says where
            time.sleep(NAP if now < due else PAUSE)
            now = time.monotonic()
        name = self.transport.name(peer)
        self.transport.wait(handle, lambda: f"{self._who()}, waiting for {name}")

    def has_come(self, handle: Handle) -> bool:
        """Return whether a message has come."""
        return handle.done or self.transport.progress(handle, 0.0)

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise other errors as an ``EngineError`` that names rank, stage and item."""
        try:
            with losses_named(self.transport, self._sharing, self._who):
                yield
        except (TransportError, EngineError):
            raise
        except Exception as error:
            name = type(error).__name__
            raise EngineError(f"{self._who()}: {name}: {one_line(error)}") from error

    def _who(self) -> str:
        return f"{self.transport.name(self.transport.rank)}, {self._doing()}"

    def _doing(self) -> str:
        return f"{self._name}, {self.item}" if self.item else self._name


def _take_back(graph: ItemGraph | None) -> None:
    """Have caches forget a graph that was foreseen in vain."""
    if graph is not None and graph.backup is not None:
        graph.backup.put_back()
