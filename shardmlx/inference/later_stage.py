"""The ranks of generation other than 0: pipeline.py shows how the stages work together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.distributed.messages import PeerLost
from shardmlx.inference.commands import Commands, Item, Stop, item_of
from shardmlx.inference.stage import Expected, ItemGraph, StageWorker

AHEAD = 2
"""Announcements that a rank may take in, and pass on, ahead of the item that it computes."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """Commands that have been announced, and what is to come into each of this rank's hops."""

    commands: Commands
    item: Item | None
    expected: Sequence[Expected] = ()

    @property
    def stops(self) -> bool:
        """True if nothing comes after these."""
        return self.commands == (Stop(),)


class LaterStage:
    """A rank other than 0, with a worker for each of its hops: it does what is announced by the
    rank before, until it is told to stop."""

    def __init__(self, *workers: StageWorker) -> None:
        self._workers = workers
        self._worker = workers[0]
        """The one that listens."""
        self._peer = self._worker.transport.rank - 1
        self._heard: deque[_Heard] = deque()
        self._next = self._worker.announcer.await_next()

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
                    for each in self._workers:
                        each.do(told.commands)
                else:
                    self._compute(told)
                worker.item = None
            for each in self._workers:
                each.outbox.drain(0)
        for each in self._workers:
            each.retract()
        worker.begin(None)

    def _compute(self, told: _Heard) -> None:
        # All of them, before another announcement finds a graph that this one takes.
        graphs = [
            worker.graph_of(told.commands, expected.inputs)
            for worker, expected in zip(self._workers, told.expected, strict=True)
        ]
        while self._may_hear():
            self._hear()
        for worker, graph, expected in zip(self._workers, graphs, told.expected, strict=True):
            worker.begin(told.item)
            with worker.named_errors():
                self._compute_hop(worker, graph, expected)
            worker.item = None

    def _compute_hop(self, worker: StageWorker, graph: ItemGraph, expected: Expected) -> None:
        worker.start_with(graph, expected)
        if worker.part.is_first:
            # Its next tokens come together with the announcement, which leaves no time.
            worker.foresee_next(graph.item)
        worker.finish(graph)
        worker.pass_on(graph)
        if not worker.part.is_first:
            worker.foresee_next(graph.item)

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
            is_next = not self._heard
            expected = [each.expect(commands, item, is_next=is_next) for each in self._workers]
            told = _Heard(commands, item, expected)
        self._heard.append(told)
        if not told.stops:  # after which nothing comes
            self._next = worker.announcer.await_next()
