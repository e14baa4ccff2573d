"""One rank's part in generating text: what every stage of a pipeline does with an item."""

from __future__ import annotations

import pickle
import time
from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from shardmlx.distributed.transport import (
    FIRST_ENGINE_TAG,
    Handle,
    PeerLost,
    Transport,
)
from shardmlx.errors import EngineError, one_line
from shardmlx.inference.kv_caches import Snapshot, TextCaches
from shardmlx.inference.sampler import Chooser
from shardmlx.inference.scheduler import Item
from shardmlx.models.slice import Slice

ANNOUNCEMENT_TAG = FIRST_ENGINE_TAG
HIDDEN_TAG = FIRST_ENGINE_TAG + 1
TOKENS_TAG = FIRST_ENGINE_TAG + 2

ANNOUNCEMENT_BYTES = 1024
"""A longer one goes on in a second message."""

UNSENT = 4
"""Messages a rank may leave unsent when it begins the next item."""

SECONDS_AWAKE = 0.2
"""A token of one text takes a stage less: for so long a message is looked for often."""

NAP = 1e-3
"""Between two looks while a message is not due yet: looking takes from the core that computes it,
where there are no more cores than ranks (measured)."""

PAUSE = 5e-5
"""Between two looks once it is due."""

DUE = 0.9
"""A message is due after this part of the shortest of the last waits."""

LENGTH_BYTES = 4


@dataclass(slots=True)
class Step:
    """An item on its way through this stage. ``inputs`` may be filled until ``outputs`` are
    evaluated."""

    item: Item
    inputs: mx.array
    outputs: mx.array
    evaluated: list[mx.array]
    snapshot: Snapshot | None = None


@dataclass(slots=True)
class Outbox:
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
        self._outbox = Outbox(transport)
        self._item: Item | None = None
        self._waits: deque[float] = deque([0.0], maxlen=4)

    # What all stages do with an item.

    def _build(self, item: Item, inputs: mx.array, *, may_fail: bool = False) -> Step:
        """The graph of an item; nothing is computed."""
        caches = self._caches.of(item)
        snapshot = Snapshot.of(caches) if may_fail else None
        hidden = self.part.extend(inputs, caches)
        # The next chunk needs all keys and values, but nothing else of the last layer.
        evaluated = [each for c in caches for each in (c.keys, c.values)]
        if not self.part.is_last:
            hidden = mx.contiguous(hidden)
            return Step(item, inputs, hidden, [hidden, *evaluated], snapshot=snapshot)
        if item.opened is not None:
            self._chooser.open(item.texts[0], item.opened)
        if not item.chooses:
            return Step(item, inputs, hidden, evaluated, snapshot=snapshot)
        chosen = self._chooser.choose(item.texts, self.part.last_logits(hidden))
        return Step(item, inputs, chosen, [chosen, *evaluated], snapshot=snapshot)

    def _compute(self, step: Step) -> None:
        step.snapshot = None
        mx.eval(step.evaluated)
        if self.part.is_last and step.item.chooses:
            self._chooser.settle(step.item.texts, np.array(step.outputs)[:, 0].tolist())

    def _close_ended(self, item: Item) -> None:
        """No more tokens of these texts are to be chosen."""
        if self.part.is_last:
            self._chooser.close([*item.kept, *item.dropped])

    def _pass_on(self, step: Step) -> None:
        if self._stage < self._last:
            self._outbox.send(step.outputs, self._stage + 1, HIDDEN_TAG, self._who())
        elif step.item.chooses:
            self._outbox.send(np.array(step.outputs), 0, TOKENS_TAG, self._who())
        self._outbox.drain(UNSENT)

    def _announce(self, item: Item) -> None:
        for part in _packed(item):
            self._outbox.send(part, self._stage + 1, ANNOUNCEMENT_TAG, self._who())

    def _wait(self, handle: Handle, peer: int) -> None:
        """With naps until the message is due, judging by the last waits, then with short pauses
        only: a token is chosen within milliseconds."""
        begin = now = time.monotonic()
        due = begin + DUE * min(self._waits)
        while now < begin + SECONDS_AWAKE and self.transport.failure is None:
            try:
                if self._has_come(handle):
                    self._waits.append(now - begin)
                    return
            except PeerLost:
                break  # what follows says where
            time.sleep(NAP if now < due else PAUSE)
            now = time.monotonic()
        self.transport.wait(
            handle, lambda: f"{self._who()}, waiting for {self.transport.name(peer)}"
        )

    def _has_come(self, handle: Handle) -> bool:
        return handle.done or self.transport.progress(handle, 0.0)

    def _begin(self, item: Item | None) -> None:
        self._item = item
        self.transport.activity = f"stage {self._stage}, {item}" if item else "generating"
        self.transport.check(self._who)

    def _who(self) -> str:
        where = f"{self.transport.name(self.transport.rank)}, stage {self._stage}"
        return f"{where}, {self._item}" if self._item else where

    def _named(self, error: Exception) -> Exception:
        return EngineError(f"{self._who()}: {type(error).__name__}: {one_line(error)}")


def _packed(item: Item) -> list[np.ndarray]:
    """Its length, then the item; pickled, since the ranks of one job trust each other."""
    payload = pickle.dumps(item)
    whole = np.frombuffer(len(payload).to_bytes(LENGTH_BYTES) + payload, np.uint8)
    first = np.zeros(ANNOUNCEMENT_BYTES, np.uint8)
    first[: len(whole)] = whole[:ANNOUNCEMENT_BYTES]
    rest = whole[ANNOUNCEMENT_BYTES:].copy()
    return [first, rest] if rest.size else [first]
