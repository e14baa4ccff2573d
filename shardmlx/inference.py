"""Generating text through pipeline stages, one rank each.

The first rank knows the prompts and decides what is computed next. It announces each item to the
next rank, which passes it on at once: the announcement runs ahead of the hidden states, so that a
stage has posted its receive, and built its graph, when they come. Hidden states go forward, chosen
tokens go back from the last rank to the first; logits never travel.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from shardmlx.choice import Choice
from shardmlx.engine import EngineError
from shardmlx.errors import one_line
from shardmlx.models.slice import Slice
from shardmlx.sampling import Chooser
from shardmlx.text_caches import Snapshot, TextCaches
from shardmlx.token_schedule import Item, Kind, Scheduler
from shardmlx.transport import (
    FIRST_ENGINE_TAG,
    Handle,
    Transport,
    TransportError,
    buffer_of,
    new_buffer,
)

ANNOUNCEMENT_TAG = FIRST_ENGINE_TAG
HIDDEN_TAG = FIRST_ENGINE_TAG + 1
TOKENS_TAG = FIRST_ENGINE_TAG + 2

ANNOUNCEMENT_BYTES = 1024
"""A longer one goes on in a second message."""

AHEAD = 2
"""Announcements that are received, and passed on, before their time."""

UNSENT = 4
"""Messages a rank may leave unsent when it begins the next item."""

SECONDS_AWAKE = 0.2
"""A token of one text takes a stage less: for so long a message is looked for every ``PAUSE``."""

PAUSE = 5e-5
"""Shorter, and without any pause, it takes from whatever else the cores do (measured)."""

_LENGTH_BYTES = 4


@dataclass(slots=True)
class _Step:
    """An item on its way through this stage. ``inputs`` may be filled until ``outputs`` are
    evaluated."""

    item: Item
    inputs: mx.array
    outputs: mx.array
    evaluated: list[mx.array]
    handle: Handle | None = None
    snapshot: Snapshot | None = None


@dataclass(slots=True)
class _Text:
    """What the first rank knows of a text: tokens that have not entered the pipeline yet."""

    tokens: list[int]
    position: int = 0


@dataclass(frozen=True, slots=True)
class _Returning:
    """Tokens that the last rank will choose."""

    item: Item
    tokens: np.ndarray
    handle: Handle


@dataclass(slots=True)
class _Outbox:
    """Messages under way, with what to call them."""

    transport: Transport
    unsent: deque[tuple[Handle, str]] = field(default_factory=deque)

    def send(self, array: mx.array | np.ndarray, peer: int, tag: int, what: str) -> None:
        what = f"{what}, sending to {self.transport.name(peer)}"
        self.unsent.append((self.transport.send(array, peer, tag), what))

    def drain(self, most: int) -> None:
        """Wait until at most so many are under way."""
        while self.unsent and (len(self.unsent) > most or self.unsent[0][0].done):
            handle, what = self.unsent.popleft()
            self.transport.wait(handle, lambda: what)  # noqa: B023 - called at once


class Pipeline:
    """One rank's part in generating: rank i runs stage i, and rank 0 leads.

    ``random_state`` is that with which the last rank begins to choose.
    """

    def __init__(
        self,
        transport: Transport,
        part: Slice,
        *,
        max_kv_size: int | None = None,
        random_state: int = 0,
    ) -> None:
        self.transport = transport
        self.part = part
        self._stage, self._last = transport.rank, transport.size - 1
        self._caches = TextCaches(lambda: part.new_caches(max_kv_size))
        self._chooser = Chooser(random_state)
        self._outbox = _Outbox(transport)
        self._item: Item | None = None

    # What all stages do with an item.

    def _build(self, item: Item, inputs: mx.array, *, may_fail: bool = False) -> _Step:
        """The graph of an item; nothing is computed."""
        caches = self._caches.of(item)
        snapshot = Snapshot.of(caches) if may_fail else None
        hidden = self.part.extend(inputs, caches)
        # The next chunk needs all keys and values, but nothing else of the last layer.
        evaluated = [each for c in caches for each in (c.keys, c.values)]
        if not self.part.is_last:
            hidden = mx.contiguous(hidden)
            return _Step(item, inputs, hidden, [hidden, *evaluated], snapshot=snapshot)
        if item.opened is not None:
            self._chooser.open(item.texts[0], item.opened)
        if not item.chooses:
            return _Step(item, inputs, hidden, evaluated, snapshot=snapshot)
        tokens = self._chooser.choose(item.texts, self.part.last_logits(hidden))
        tokens = tokens.astype(mx.int32)
        return _Step(item, inputs, tokens, [tokens, *evaluated], snapshot=snapshot)

    def _compute(self, step: _Step) -> None:
        step.snapshot = None
        mx.eval(step.evaluated)
        if self.part.is_last and step.item.chooses:
            self._chooser.settle()

    def _pass_on(self, step: _Step) -> None:
        if self._stage < self._last:
            self._outbox.send(step.outputs, self._stage + 1, HIDDEN_TAG, self._who())
        elif step.item.chooses:
            self._outbox.send(np.array(step.outputs), 0, TOKENS_TAG, self._who())
        self._outbox.drain(UNSENT)

    def _announce(self, item: Item) -> None:
        for part in _packed(item):
            self._outbox.send(part, self._stage + 1, ANNOUNCEMENT_TAG, self._who())

    def _wait(self, handle: Handle, peer: int) -> None:
        """At first with short pauses only: a token is chosen within milliseconds."""
        end = time.monotonic() + SECONDS_AWAKE
        while time.monotonic() < end and self.transport.failure is None:
            if handle.done or self.transport.progress(handle, 0.0):
                return
            time.sleep(PAUSE)
        self.transport.wait(
            handle, lambda: f"{self._who()}, waiting for {self.transport.name(peer)}"
        )

    def _begin(self, item: Item | None) -> None:
        self._item = item
        self.transport.activity = f"stage {self._stage}, {item}" if item else "generating"
        self.transport.check(self._who)

    def _who(self) -> str:
        where = f"{self.transport.name(self.transport.rank)}, stage {self._stage}"
        return f"{where}, {self._item}" if self._item else where

    def _named(self, error: Exception) -> Exception:
        return EngineError(f"{self._who()}: {type(error).__name__}: {one_line(error)}")


class Leader(Pipeline):
    """Rank 0: prompts come in here, and tokens come out."""

    def __init__(
        self,
        transport: Transport,
        part: Slice,
        scheduler: Scheduler,
        *,
        max_kv_size: int | None = None,
        random_state: int = 0,
    ) -> None:
        super().__init__(transport, part, max_kv_size=max_kv_size, random_state=random_state)
        self._scheduler = scheduler
        self._texts: dict[int, _Text] = {}
        self._returning: deque[_Returning] = deque()
        self._foreseen: _Step | None = None

    @property
    def is_idle(self) -> bool:
        """No text is under way or waits."""
        return self._scheduler.is_idle

    def add(self, text: int, tokens: Sequence[int], choice: Choice) -> None:
        """Take in a prompt, under a number of its own."""
        self._texts[text] = _Text(list(tokens))
        self._scheduler.add(text, len(tokens), choice)

    def finish(self, text: int) -> None:
        """A text is at its end: called with the last of its tokens that ``step`` returned."""
        del self._texts[text]
        self._scheduler.finish(text)

    def step(self) -> list[tuple[int, int]]:
        """Do what is to be done next; returns the (text, token) pairs that have come in.

        Raises ``EngineError`` and what transports raise, with rank, stage and item.
        """
        try:
            return self._step()
        except (TransportError, EngineError):
            raise
        except Exception as error:
            raise self._named(error) from error

    def _step(self) -> list[tuple[int, int]]:
        if came := self._take():
            return came
        item = self._scheduler.next()
        if item is not None:
            self._issue(item)
            return []
        if not self._returning:
            return []
        self._foresee()
        first = self._returning[0]
        self._item = first.item
        self._wait(first.handle, self._last)
        return self._take()

    def stop(self) -> None:
        """Let all ranks leave."""
        if self._stage < self._last:
            self._announce(Item(Kind.STOP))
            self._outbox.drain(0)
        self._begin(None)

    def _issue(self, item: Item) -> None:
        self._begin(item)
        if self.part.is_last:
            self._chooser.close(item.dropped)
        if self._stage < self._last:
            self._announce(item)
            tokens = np.zeros(len(item.texts), np.int32)
            if item.chooses:
                handle = self.transport.receive(tokens, self._last, TOKENS_TAG)
                self._returning.append(_Returning(item, tokens, handle))
        step = self._prepared(item)
        self._fill(step)
        self._compute(step)
        if self._stage < self._last:
            self._pass_on(step)
        elif item.chooses:
            tokens = np.array(step.outputs)
            self._returning.append(_Returning(item, tokens, Handle(tokens, done=True)))

    def _prepared(self, item: Item) -> _Step:
        """The graph of the item, if it was foreseen or not."""
        step, self._foreseen = self._foreseen, None
        if step is not None:
            if (step.item.group, step.item.texts) == (item.group, item.texts):
                self._caches.drop(item.dropped)
                return step
            if step.snapshot is not None:
                step.snapshot.restore()
        return self._build(item, new_buffer((len(item.texts), item.length), mx.int32))

    def _foresee(self) -> None:
        """Build the next graph while there is nothing else to do."""
        if self._foreseen is None and (item := self._scheduler.foreseen()) is not None:
            inputs = new_buffer((len(item.texts), 1), mx.int32)
            self._foreseen = self._build(item, inputs, may_fail=True)

    def _fill(self, step: _Step) -> None:
        """Write the tokens that enter into the inputs of the graph."""
        rows = np.frombuffer(buffer_of(step.inputs), np.int32).reshape(step.inputs.shape)
        for row, number in zip(rows, step.item.texts, strict=True):
            text = self._texts[number]
            end = text.position + step.item.length
            row[:] = text.tokens[text.position : end]
            text.position = end

    def _take(self) -> list[tuple[int, int]]:
        came = []
        while self._returning and self._has_come(self._returning[0].handle):
            done = self._returning.popleft()
            self._scheduler.returned(done.item)
            for number, token in zip(done.item.texts, done.tokens.tolist(), strict=True):
                self._texts[number].tokens.append(token)
                came.append((number, token))
        return came

    def _has_come(self, handle: Handle) -> bool:
        return handle.done or self.transport.progress(handle, 0.0)


class Follower(Pipeline):
    """Every other rank: does what is announced, until it is told to stop."""

    def __init__(
        self,
        transport: Transport,
        part: Slice,
        *,
        max_kv_size: int | None = None,
        random_state: int = 0,
    ) -> None:
        super().__init__(transport, part, max_kv_size=max_kv_size, random_state=random_state)
        self._announced: deque[tuple[Item, mx.array, Handle | None]] = deque()
        self._next = self._post_announcement()

    def run(self) -> None:
        """Returns when the leader has stopped; raises as ``Leader.step``."""
        try:
            while (step := self._next_step()) is not None:
                self._compute(step)
                self._pass_on(step)
                self._item = None
            self._outbox.drain(0)
        except (TransportError, EngineError):
            raise
        except Exception as error:
            raise self._named(error) from error
        self._begin(None)

    def _next_step(self) -> _Step | None:
        """The next item with its inputs; None at the end."""
        if not self._announced:
            self._begin(None)
            self._wait(self._next[0], self._stage - 1)
            self._hear()
        item, inputs, handle = self._announced.popleft()
        self._begin(item)
        if handle is None:
            return None
        if self.part.is_last:
            self._chooser.close(item.dropped)
        step = self._build(item, inputs)
        while len(self._announced) < AHEAD and self._next[0].done:
            self._hear()
        self._wait(handle, self._stage - 1)
        return step

    def _hear(self) -> None:
        """Take an announcement that has come: pass it on, and post the receive it speaks of."""
        handle, buffer = self._next
        length = int.from_bytes(buffer[:_LENGTH_BYTES].tobytes())
        packed = buffer[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
        if length > len(packed):
            rest = np.zeros(length - len(packed), np.uint8)
            self._wait(
                self.transport.receive(rest, self._stage - 1, ANNOUNCEMENT_TAG), self._stage - 1
            )
            packed += rest.tobytes()
        item: Item = pickle.loads(packed)
        if self._stage < self._last:
            self._announce(item)
        if item.kind is Kind.STOP:
            self._announced.append((item, mx.zeros(0), None))
            self._next = (Handle(buffer), buffer)  # nothing will come any more
            return
        inputs = new_buffer((len(item.texts), item.length, self.part.hidden_size), self.part.dtype)
        handle = self.transport.receive(inputs, self._stage - 1, HIDDEN_TAG)
        self._announced.append((item, inputs, handle))
        self._next = self._post_announcement()

    def _post_announcement(self) -> tuple[Handle, np.ndarray]:
        buffer = np.zeros(ANNOUNCEMENT_BYTES, np.uint8)
        return self.transport.receive(buffer, self._stage - 1, ANNOUNCEMENT_TAG), buffer


def _packed(item: Item) -> list[np.ndarray]:
    """Its length, then the item; pickled, since the ranks of one job trust each other."""
    payload = pickle.dumps(item)
    whole = np.frombuffer(len(payload).to_bytes(_LENGTH_BYTES) + payload, np.uint8)
    first = np.zeros(ANNOUNCEMENT_BYTES, np.uint8)
    first[: len(whole)] = whole[:ANNOUNCEMENT_BYTES]
    rest = whole[ANNOUNCEMENT_BYTES:].copy()
    return [first, rest] if rest.size else [first]
