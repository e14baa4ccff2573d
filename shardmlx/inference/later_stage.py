"""The ranks of generation other than 0: pipeline.py shows how the stages work together."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass

import mlx.core as mx

from shardmlx.distributed.messages import Handle, PeerLost, copy_into
from shardmlx.inference.commands import Commands, Decode, Item, Stop, item_of
from shardmlx.inference.stage import HIDDEN_TAG, StageWorker

AHEAD = 2
"""Announcements that a rank may take in, and pass on, ahead of the item that it computes."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """Commands that have been announced, with their item's inputs, and the receive of these."""

    commands: Commands
    item: Item | None
    inputs: mx.array | None = None
    handle: Handle | None = None

    @property
    def stops(self) -> bool:
        """True if nothing comes after these."""
        return self.commands == (Stop(),)


class LaterStage:
    """A rank other than 0: it does what is announced by the one before, until it is told to
    stop."""

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker
        self._peer = worker.transport.rank - 1
        self._heard: deque[_Heard] = deque()
        self._next = worker.announcer.await_next()

    def run(self) -> None:
        """Work until rank 0 calls ``FirstStage.stop``. Raises as ``FirstStage.step``."""
        worker = self._worker
        is_told_to_stop = False
        with worker.named_errors():
            while not is_told_to_stop:
                if not self._heard:
                    worker.begin(None)
                    worker.wait(self._next, self._peer)
                    self._hear()
                told = self._heard.popleft()
                is_told_to_stop = told.stops
                worker.begin(told.item)
                if told.item is None:
                    worker.do(told.commands)
                else:
                    self._compute(told)
                worker.item = None
            worker.outbox.drain(0)
        worker.retract()
        worker.begin(None)

    def _compute(self, told: _Heard) -> None:
        worker = self._worker
        graph = worker.graph_of(told.commands, told.inputs)
        while self._may_hear():
            self._hear()
        assert told.handle is not None, "an item has inputs"
        assert told.inputs is not None, "an item has inputs"
        worker.wait(told.handle, worker.giver)
        if graph.inputs is not told.inputs:
            copy_into(graph.inputs, told.inputs)
        worker.start(graph)
        if worker.stage == 0:
            # Its next tokens come together with the announcement, which leaves no time.
            self._foresee(told.item)
        worker.finish(graph)
        worker.pass_on(graph)
        if worker.stage > 0:
            self._foresee(told.item)

    def _foresee(self, item: Item | None) -> None:
        """Build the graph of a group's next step, while its tokens are on their way."""
        if isinstance(item, Decode) and item.is_plain:
            self._worker.foresee(Decode(item.sequences, item.group))

    def _may_hear(self) -> bool:
        """Return whether an announcement has come, and may be taken in ahead of its time."""
        stops = bool(self._heard) and self._heard[-1].stops
        if stops or len(self._heard) >= AHEAD:
            return False
        with contextlib.suppress(PeerLost):  # who waits for it says where
            return self._worker.has_come(self._next)
        return False

    def _hear(self) -> None:
        """Take in an announcement that has come: pass it on, and post the receive of its inputs."""
        worker = self._worker
        commands = worker.heard(self._next)
        item = item_of(commands)
        told = _Heard(commands, item)
        if item is not None:
            # A graph that was foreseen has a buffer, unless items before may have it forgotten.
            graph = None if self._heard else worker.foreseen_by(commands)
            inputs = worker.new_inputs(item) if graph is None else graph.inputs
            handle = worker.transport.receive(inputs, worker.giver, HIDDEN_TAG)
            told = _Heard(commands, item, inputs, handle)
        self._heard.append(told)
        if not told.stops:  # after which nothing comes
            self._next = worker.announcer.await_next()
