"""The ranks of generation other than 0: pipeline.py shows how the stages work together."""

from __future__ import annotations

import contextlib
from collections import deque

import mlx.core as mx

from shardmlx.distributed.messages import Handle, PeerLost, copy_into
from shardmlx.inference.scheduler import Item, ItemKind
from shardmlx.inference.stage import HIDDEN_TAG, StageWorker

AHEAD = 2
"""Announcements that a rank may take in, and pass on, ahead of the item that it computes."""


class LaterStage:
    """A rank other than 0: it does what is announced by the one before, until it is told to
    stop."""

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker
        self._peer = worker.transport.rank - 1
        # Items that have been announced, each with its inputs, and the receive of these.
        self._heard: deque[tuple[Item, mx.array, Handle]] = deque()
        self._next = worker.await_announcement()

    def run(self) -> None:
        """Work until rank 0 calls ``FirstStage.stop``. Raises as ``FirstStage.step``."""
        worker, kind = self._worker, ItemKind.IDLE
        with worker.named_errors():
            while kind is not ItemKind.STOP:
                if not self._heard:
                    worker.begin(None)
                    worker.wait(self._next, self._peer)
                    self._hear()
                item, inputs, handle = self._heard.popleft()
                kind = item.kind
                worker.begin(item)
                if kind is ItemKind.IDLE:
                    worker.retract()
                    worker.update(item)
                elif kind is not ItemKind.STOP:
                    self._compute(item, inputs, handle)
                worker.item = None
            worker.outbox.drain(0)
        worker.begin(None)

    def _compute(self, item: Item, inputs: mx.array, handle: Handle) -> None:
        worker = self._worker
        graph = worker.graph_of(item, inputs)
        while self._may_hear():
            self._hear()
        worker.wait(handle, worker.giver)
        if graph.inputs is not inputs:
            copy_into(graph.inputs, inputs)
        worker.start(graph)
        # Its tokens come together with the announcement, which leaves no time to build a graph.
        if worker.stage == 0 and item.kind is ItemKind.DECODE and item.is_plain:
            worker.foresee(Item(item.kind, item.sequences, group=item.group))
        worker.finish(graph)
        worker.pass_on(graph)

    def _may_hear(self) -> bool:
        """Return whether an announcement has come, and may be taken in ahead of its time."""
        stops = bool(self._heard) and self._heard[-1][0].kind is ItemKind.STOP
        if stops or len(self._heard) >= AHEAD:
            return False
        with contextlib.suppress(PeerLost):  # who waits for it says where
            return self._worker.has_come(self._next)
        return False

    def _hear(self) -> None:
        """Take in an announcement that has come: pass it on, and post the receive of its inputs."""
        worker = self._worker
        item = worker.heard(self._next)
        inputs = mx.zeros(0)
        handle = Handle(inputs, done=True)
        if item.kind not in (ItemKind.STOP, ItemKind.IDLE):
            inputs = worker.inputs(item)
            handle = worker.transport.receive(inputs, worker.giver, HIDDEN_TAG)
        self._heard.append((item, inputs, handle))
        if item.kind is not ItemKind.STOP:  # after which nothing comes
            self._next = worker.await_announcement()
