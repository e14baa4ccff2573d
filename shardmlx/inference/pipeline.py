"""Generating text through pipeline stages, one rank each.

The first rank knows the prompts and decides what is computed next. It announces each item to the
next rank, which passes it on at once: the announcement runs ahead of the hidden states, so that a
stage has posted its receive, and built its graph, when they come. Hidden states go forward, chosen
tokens go back from the last rank to the first; logits never travel.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from shardmlx.distributed.transport import (
    Handle,
    PeerLost,
    Transport,
    TransportError,
    buffer_of,
    new_buffer,
)
from shardmlx.errors import EngineError
from shardmlx.inference.prefix_cache import Beginning, PrefixCache
from shardmlx.inference.sampler import packed_width, unpack
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.inference.scheduler import Item, Kind, Scheduler
from shardmlx.inference.stage import (
    ANNOUNCEMENT_BYTES,
    ANNOUNCEMENT_TAG,
    HIDDEN_TAG,
    LENGTH_BYTES,
    TOKENS_TAG,
    UNSENT,
    Pipeline,
    Step,
)
from shardmlx.models.slice import Slice

AHEAD = 2
"""Announcements that are received, and passed on, before their time."""


@dataclass(slots=True)
class _Text:
    """What the first rank knows of a text: its tokens, of which those up to ``position`` have
    entered the pipeline, and those up to ``cached`` had before. ``awaits`` a token under way."""

    tokens: list[int]
    choice: SamplingParams
    position: int = 0
    cached: int = 0
    awaits: bool = False
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Returning:
    """Tokens that the last rank will choose, a row for each text."""

    item: Item
    chosen: np.ndarray
    handle: Handle


class FirstStage(Pipeline):
    """Rank 0: prompts come in here, and tokens come out.

    Texts that have ended are kept in ``prefixes``, if it is given, for prompts that begin like
    them, as far as the scheduler's capacity goes.
    """

    def __init__(
        self,
        transport: Transport,
        part: Slice,
        scheduler: Scheduler,
        *,
        max_kv_size: int | None = None,
        random_state: int = 0,
        prefixes: PrefixCache | None = None,
    ) -> None:
        super().__init__(transport, part, max_kv_size=max_kv_size, random_state=random_state)
        self._scheduler = scheduler
        self._prefixes = prefixes
        if prefixes is not None:
            scheduler.begin = self._find_beginning
        self._texts: dict[int, _Text] = {}
        self._returning: deque[_Returning] = deque()
        self._foreseen: Step | None = None

    @property
    def is_idle(self) -> bool:
        """No text is under way or waits."""
        return self._scheduler.is_idle

    @property
    def kept_tokens(self) -> int:
        """Tokens that ``prefixes`` keeps room for."""
        return self._prefixes.tokens if self._prefixes is not None else 0

    def add(
        self, text: int, tokens: Sequence[int], choice: SamplingParams, context: int = 0
    ) -> None:
        """Take in a prompt, under a number of its own. It may become a text of ``context`` tokens:
        needed where the scheduler has a capacity."""
        self._texts[text] = _Text(list(tokens), choice)
        self._scheduler.add(text, len(tokens), choice, context)

    def cached(self, text: int) -> int:
        """How many tokens of a prompt were there already, once its first token has come."""
        return self._texts[text].cached

    def finish(self, text: int) -> None:
        """A text is at its end: called with the last of its tokens that ``step`` returned."""
        known = self._texts.pop(text)
        keep = self._prefixes is not None and known.position > 0
        if self._prefixes is not None and keep:
            self._prefixes.keep(text, known.tokens[: known.position])
        self._scheduler.finish(text, keep=keep)

    def cancel(self, text: int) -> None:
        """Give up a text at any time before its end: ``step`` returns no more tokens of it."""
        if self._texts[text].awaits:
            self._texts[text].is_cancelled = True
        else:
            self.finish(text)

    def rest(self) -> None:
        """To be called every now and then while there is nothing to do: it tells the other ranks
        that all is well, and raises if one is lost."""
        self._begin(None)
        item = self._scheduler.rest()
        if self._stage < self._last:
            self._announce(item)
            self._outbox.drain(UNSENT)
        self._close_ended(item)
        self._retract_foreseen()
        self._caches.hear(item)

    def step(self) -> list[tuple[int, SampledToken]]:
        """Do what is to be done next; returns what has been chosen for which text.

        Raises ``EngineError`` and what transports raise, with rank, stage and item.
        """
        try:
            return self._step()
        except (TransportError, EngineError):
            raise
        except Exception as error:
            raise self._named(error) from error

    def _step(self) -> list[tuple[int, SampledToken]]:
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
        self._close_ended(item)
        if item.begins is not None:
            text = self._texts[item.texts[0]]
            text.position = text.cached = item.begins.length
        if self._stage < self._last:
            self._announce(item)
            if item.chooses:
                width = packed_width([self._texts[number].choice for number in item.texts])
                chosen = np.zeros((len(item.texts), width), np.int32)
                handle = self.transport.receive(chosen, self._last, TOKENS_TAG)
                self._returning.append(_Returning(item, chosen, handle))
        step = self._prepared(item)
        self._fill(step)
        self._compute(step)
        if self._stage < self._last:
            self._pass_on(step)
        elif item.chooses:
            chosen = np.array(step.outputs)
            self._returning.append(_Returning(item, chosen, Handle(chosen, done=True)))

    def _prepared(self, item: Item) -> Step:
        """The graph of the item, if it was foreseen or not."""
        step = self._foreseen
        if step is not None and (step.item.group, step.item.texts) == (item.group, item.texts):
            self._foreseen = None
            self._caches.hear(item)
            return step
        self._retract_foreseen()
        return self._build(item, new_buffer((len(item.texts), item.length), mx.int32))

    def _foresee(self) -> None:
        """Build the next graph while there is nothing else to do."""
        if self._foreseen is None and (item := self._scheduler.foreseen()) is not None:
            inputs = new_buffer((len(item.texts), 1), mx.int32)
            self._foreseen = self._build(item, inputs, may_fail=True)

    def _retract_foreseen(self) -> None:
        step, self._foreseen = self._foreseen, None
        if step is not None and step.snapshot is not None:
            step.snapshot.restore()

    def _fill(self, step: Step) -> None:
        """Write the tokens that enter into the inputs of the graph."""
        rows = np.frombuffer(buffer_of(step.inputs), np.int32).reshape(step.inputs.shape)
        for row, number in zip(rows, step.item.texts, strict=True):
            text = self._texts[number]
            end = text.position + step.item.length
            row[:] = text.tokens[text.position : end]
            text.position = end
            text.awaits = step.item.chooses

    def _take(self) -> list[tuple[int, SampledToken]]:
        came = []
        while self._returning and self._has_come(self._returning[0].handle):
            done = self._returning.popleft()
            self._scheduler.returned(done.item)
            for number, row in zip(done.item.texts, done.chosen, strict=True):
                text = self._texts[number]
                text.awaits = False
                if text.is_cancelled:
                    self.finish(number)
                    continue
                chosen = unpack(row, text.choice)
                text.tokens.append(chosen.token)
                came.append((number, chosen))
        return came

    def _find_beginning(self, number: int) -> Beginning | None:
        """What of a prompt is kept; and makes room for the text."""
        prefixes, capacity = self._prefixes, self._scheduler.capacity
        assert prefixes is not None
        beginning = prefixes.take(self._texts[number].tokens)
        if beginning is not None and beginning.is_whole:
            self._scheduler.forget([beginning.text])
        if capacity is not None:
            self._scheduler.forget(prefixes.shrink(capacity - self._scheduler.reserved))
        return beginning


class LaterStage(Pipeline):
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
        """Returns when the leader has stopped; raises as ``FirstStage.step``."""
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

    def _next_step(self) -> Step | None:
        """The next item with its inputs; None at the end."""
        while True:
            if not self._announced:
                self._begin(None)
                self._wait(self._next[0], self._stage - 1)
                self._hear()
            item, inputs, handle = self._announced.popleft()
            if item.kind is Kind.STOP:
                self._begin(item)
                return None
            self._close_ended(item)
            if handle is not None:
                break
            self._caches.hear(item)
        self._begin(item)
        step = self._build(item, inputs)
        while self._may_hear():
            self._hear()
        self._wait(handle, self._stage - 1)
        return step

    def _may_hear(self) -> bool:
        """Whether an announcement has come, and may be taken ahead of its time."""
        stops = bool(self._announced) and self._announced[-1][0].kind is Kind.STOP
        if stops or len(self._announced) >= AHEAD:
            return False
        with contextlib.suppress(PeerLost):  # who waits for it says where
            return self._has_come(self._next[0])
        return False

    def _hear(self) -> None:
        """Take an announcement that has come: pass it on, and post the receive it speaks of."""
        handle, buffer = self._next
        length = int.from_bytes(buffer[:LENGTH_BYTES].tobytes())
        packed = buffer[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
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
        if item.kind is Kind.REST:
            self._announced.append((item, mx.zeros(0), None))
            self._next = self._post_announcement()
            return
        inputs = new_buffer((len(item.texts), item.length, self.part.hidden_size), self.part.dtype)
        handle = self.transport.receive(inputs, self._stage - 1, HIDDEN_TAG)
        self._announced.append((item, inputs, handle))
        self._next = self._post_announcement()

    def _post_announcement(self) -> tuple[Handle, np.ndarray]:
        buffer = np.zeros(ANNOUNCEMENT_BYTES, np.uint8)
        return self.transport.receive(buffer, self._stage - 1, ANNOUNCEMENT_TAG), buffer
