"""A worker that computes items of generation, on every rank, whichever stage it has."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import (
    FIRST_ENGINE_TAG,
    Handle,
    PeerLost,
    TransportError,
    buffer_of,
    new_buffer,
)
from shardmlx.distributed.mlx_group import losses_named
from shardmlx.distributed.transport import Outbox, Transport
from shardmlx.errors import EngineError, one_line
from shardmlx.inference.drafts import accepted
from shardmlx.inference.kv_caches import Caches, KVCaches
from shardmlx.inference.prefix_files import PrefixFiles
from shardmlx.inference.sampler import BatchSampler
from shardmlx.inference.scheduler import Item
from shardmlx.models.runtime.draft_head import DraftHead
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.mesh import Mesh

ANNOUNCEMENT_TAG = FIRST_ENGINE_TAG
HIDDEN_TAG = FIRST_ENGINE_TAG + 1
TOKENS_TAG = FIRST_ENGINE_TAG + 2

UNSENT = 6
"""Messages that a rank may leave unsent when it begins the next item."""

SECONDS_AWAKE = 0.2
"""Seconds of polling, more than a decode step takes a stage; then it waits as transports do."""

DUE = 0.9
"""A message is due after this fraction of the shortest of the last waits."""

NAP, PAUSE = 1e-3, 5e-5
"""Seconds between two polls before a message is due, and from then on: where there are no more
cores than ranks, polling takes time from the core that computes the message (measured)."""


@dataclass(slots=True)
class ItemGraph:
    """The lazy graph of an item on this stage: ``inputs`` are a buffer to fill before
    ``evaluated`` is evaluated. While it may be taken back there is a ``backup`` of the layers'
    ``caches``. ``states`` are hidden states after the layers."""

    item: Item
    inputs: mx.array
    states: mx.array
    outputs: mx.array
    evaluated: list[Any]
    caches: Caches
    backup: Caches | None = None


@dataclass
class StageWorker:
    """A rank's part in generation, held by the stage that says what is next: rank i has stage i, or
    a share of a stage in a ``mesh`` of such.

    ``part`` holds the stage's layers. The first rank of those that share the last stage samples,
    by its ``sampler``. Without shares it has the model's ``head`` if that drafts: the last of
    ``caches`` is then the head's. Kept sequences have ``files`` where they outlive the job.
    ``item`` is at work now: errors name it.
    """

    transport: Transport
    part: Slice
    caches: KVCaches
    sampler: BatchSampler
    files: PrefixFiles | None = None
    head: DraftHead | None = None
    item: Item | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        rank, mesh = self.transport.rank, self.mesh or Mesh(1, self.transport.size)
        self.stage = mesh.coordinates(rank)[1]
        self.last = mesh.rank(0, mesh.pp - 1)  # which samples
        self._sharing = mesh.sharing(rank)
        self._is_last = self.part.is_last and rank == self.last
        self.outbox = Outbox(self.transport)
        self._foreseen: ItemGraph | None = None
        self._waits: deque[float] = deque([0.0], maxlen=4)

    def begin(self, item: Item | None) -> None:
        """Begin an item, or wait for one. Raises what transports raise if a rank is lost."""
        self.item = item
        what = f"stage {self.stage}, {item}" if item else "generating"
        self.transport.activity.begin(what)
        self.transport.activity.check(self._who)

    def inputs(self, item: Item) -> mx.array:
        """Return a buffer for an item's token ids, or hidden states, to be filled."""
        shape = len(item.sequences), item.length
        if self.part.is_first:
            return mx.array(np.zeros(shape, np.int32))  # evaluated, whatever is being computed
        return new_buffer((*shape, self.part.hidden_size), self.part.dtype)

    def update(self, item: Item) -> None:
        """Move caches, and forget sampling states, as an item says of sequences that have left."""
        self.sampler.close([*item.kept, *item.dropped])
        self.caches.update(item)
        if self.files is not None:
            for sequence, key in item.restored:
                self.caches.restore(sequence, self.files.read(key))
            if item.stored is not None:
                self.files.mirror({key: self.caches.kept(each) for each, key in item.stored})

    def build(self, item: Item, inputs: mx.array, *, is_foreseen: bool = False) -> ItemGraph:
        """Build the graph of an item, to be computed later. That of one which ``is_foreseen``, and
        may not come, has a backup, and is to ``sample`` when the tokens before are known."""
        self.update(item)
        caches = self.caches.of(item)
        of_layers = caches if self.head is None else caches[:-1]
        backup = copy.deepcopy(of_layers) if is_foreseen else None
        states = outputs = self.part.extend(inputs, of_layers)
        if self.head is not None and not item.samples:
            self.head.enter(mx.array([item.following]), states, caches[-1])
        self.caches.keep_border(item)
        # The next chunk needs all keys and values, and nothing else of the last layer.
        evaluated = [cache.state for cache in (of_layers if item.samples else caches)]
        if item.params is not None and self._is_last:
            self.sampler.open(item.sequences[0], item.params)
        if self._is_last and item.samples:
            outputs = self.part.last_logits(outputs, item.length)
        elif item.samples or not self.part.is_last:
            outputs = mx.contiguous(outputs)
            evaluated.append(outputs)
        graph = ItemGraph(item, inputs, states, outputs, evaluated, caches, backup)
        if not is_foreseen:
            self.sample(graph)
        return graph

    def foresee(self, likely: Item) -> None:
        """Build the graph of the item that likely comes next, unless there is one."""
        if self._foreseen is None:
            self._foreseen = self.build(likely, self.inputs(likely), is_foreseen=True)

    def graph_of(self, item: Item, inputs: mx.array) -> ItemGraph:
        """Return the graph of an item. One that was foreseen has ``inputs`` of its own."""
        graph = self._foreseen
        wanted = item.group, item.sequences, item.length
        likely = graph and (graph.item.group, graph.item.sequences, graph.item.length)
        if graph and likely == wanted and not item.rejected:
            self._foreseen, graph.item = None, item
            self.update(item)
            self.sample(graph)
            return graph
        self.retract()
        return self.build(item, inputs)

    def retract(self) -> None:
        """Forget what was foreseen."""
        if self._foreseen is not None:
            if (backup := self._foreseen.backup) is not None:
                self._foreseen.caches[: len(backup)] = backup
            self._foreseen = None

    def sample(self, graph: ItemGraph) -> None:
        """Have the last stage's graph of an item that samples end in tokens, no longer in logits:
        they depend on the tokens before in penalties, grammars and random streams."""
        item = graph.item
        if self._is_last and item.samples:
            graph.outputs = self.sampler.sample(item.sequences, graph.outputs, item.drafts)
            graph.evaluated.append(graph.outputs)

    def start(self, graph: ItemGraph) -> None:
        """Begin to evaluate a graph whose inputs are filled; it cannot be taken back any more."""
        # Before it is evaluated: MLX writes in place only into an array that nobody else holds.
        graph.backup = None
        mx.async_eval(graph.evaluated)  # type: ignore[no-untyped-call]

    def finish(self, graph: ItemGraph) -> None:
        """Wait until a graph is evaluated."""
        if not graph.item.samples:
            mx.eval(graph.evaluated)
            return
        # No caches: by now they may hold arrays of a foreseen graph, whose inputs are not filled.
        mx.eval(graph.outputs)
        if not self._is_last:
            return
        item, tokens = graph.item, np.array(graph.outputs)[:, 0].tolist()
        self.sampler.settle(item.sequences, tokens, item.drafts, item.guess)
        if self.head is not None:
            self._guess(self.head, graph, tokens)

    def _guess(self, head: DraftHead, graph: ItemGraph, tokens: list[int]) -> None:
        """Let the head read the sampled ``tokens``; have those that it guesses follow them."""
        item, cache, shape = graph.item, graph.caches[-1], graph.states.shape[:2]
        states = head.enter(mx.array(tokens).reshape(shape), graph.states, cache)
        if item.guesses:
            right = accepted(item.drafts, tokens)
            wrong = len(item.drafts) - right
            cache.trim(wrong)
            guessed = head.guess(states[:, right : right + 1], item.guesses, cache)
            # It stays as long as the layers' caches, which are cut with the next item.
            cache.trim(item.guesses - 1 - wrong)
            rows = mx.pad(guessed[:, None], [(0, 0), (0, graph.outputs.shape[1] - 1)])
            graph.outputs = mx.concatenate([graph.outputs, rows])
        mx.async_eval(graph.outputs, cache.state)  # type: ignore[no-untyped-call]

    def pass_on(self, graph: ItemGraph) -> None:
        """Send hidden states to the next stage, or sampled tokens from the last one to rank 0, and
        forget messages that have been sent."""
        if not self.part.is_last:
            peer = self.transport.rank + len(self._sharing)
            self.outbox.send(graph.outputs, peer, HIDDEN_TAG, self._doing())
        elif self._is_last and self.last and graph.item.samples:
            self.outbox.send(np.array(graph.outputs), 0, TOKENS_TAG, self._doing())
        self.outbox.drain(UNSENT)

    def share_tokens(self, graph: ItemGraph) -> None:
        """Send the first stage's token ids to the other ranks that share it."""
        for peer in self._sharing[1:]:
            self.outbox.send(graph.inputs, peer, HIDDEN_TAG, self._doing())

    @property
    def giver(self) -> int:
        """The rank that gives this one, which is not rank 0, the inputs of its items."""
        return self.transport.rank - len(self._sharing) if self.stage else 0

    def announce(self, item: Item) -> None:
        """Tell the next rank, if there is one, what it computes next."""
        if (peer := self.transport.rank + 1) < self.transport.size:
            self.outbox.send_object(pickle.dumps(item), peer, ANNOUNCEMENT_TAG, self._doing())

    def await_announcement(self) -> Handle:
        """Post the receive of the next announcement's size."""
        size = np.empty(1, np.int64)
        return self.transport.receive(size, self.transport.rank - 1, ANNOUNCEMENT_TAG)

    def heard(self, announcement: Handle) -> Item:
        """Return what an announcement says whose size has come, and pass it on."""
        peer, name = self.transport.rank - 1, self.transport.name
        data = np.empty(int(announcement.array[0]), np.uint8)
        handle = self.transport.receive(data, peer, ANNOUNCEMENT_TAG)
        self.transport.wait(handle, lambda: f"{self._who()}, waiting for {name(peer)}")
        item: Item = pickle.loads(buffer_of(data))
        self.announce(item)
        return item

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
        return f"stage {self.stage}, {self.item}" if self.item else f"stage {self.stage}"
