"""Python objects between ranks, for small messages outside the hot path.

Objects are pickled: the ranks of one job trust each other.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardmlx.distributed.messages import OBJECT_TAG, Array, Handle, buffer_of


class ObjectCollectives(ABC):
    """Objects from rank to rank, and between all ranks, on top of messages of arrays.

    Timeouts name the step ``what`` of a method. All ranks must call ``broadcast``, ``gather``,
    ``all_gather`` and ``barrier``, in the same order.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]

    @abstractmethod
    def send(self, array: Array, peer: int, tag: int) -> Handle:
        """Start sending; ``array`` must stay unchanged until the handle is done."""

    @abstractmethod
    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        """Start receiving straight into the buffer of ``array``, which fixes shape and dtype."""

    @abstractmethod
    def wait(self, handle: Handle, what: Callable[[], str]) -> None:
        """End a message; ``what`` names the wait in a timeout."""

    def name(self, rank: int) -> str:
        """Return how messages to the user call a rank."""
        return f"rank {rank} on {self.hosts[rank]}"

    def send_object(self, value: Any, peer: int, what: str = "send", tag: int = OBJECT_TAG) -> None:
        """Send one Python object; return once it is on its way."""
        self._finish(self._post(pickle.dumps(value), peer, tag), what, peer)

    def receive_object(self, peer: int, what: str = "receive", tag: int = OBJECT_TAG) -> Any:
        """Return the next object from ``peer``."""
        me = self.name(self.rank)

        def come(array: np.ndarray) -> np.ndarray:
            handle = self.receive(array, peer, tag)
            self.wait(handle, lambda: f"{me}, {what}, waiting for {self.name(peer)}")
            return array

        (size,) = come(np.empty(1, np.int64))
        return pickle.loads(buffer_of(come(np.empty(size, np.uint8))))

    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        """Return the root's ``value``. All ranks must call it."""
        if self.rank != root:
            return self.receive_object(root, what)
        payload = pickle.dumps(value)
        peers = [peer for peer in range(self.size) if peer != root]
        posted = [self._post(payload, peer, OBJECT_TAG) for peer in peers]
        for peer, handles in zip(peers, posted, strict=True):
            self._finish(handles, what, peer)
        return value

    def gather(self, value: Any, root: int = 0, what: str = "gather") -> list[Any] | None:
        """Return the values of all ranks, by rank, on the root; None elsewhere.

        All ranks must call it.
        """
        if self.rank != root:
            self.send_object(value, root, what)
            return None
        return [
            value if peer == root else self.receive_object(peer, what) for peer in range(self.size)
        ]

    def all_gather(self, value: Any, what: str = "all-gather") -> list[Any]:
        """Return the values of all ranks, by rank. All ranks must call it."""
        values: list[Any] = self.broadcast(self.gather(value, what=what), what=what)
        return values

    def barrier(self, what: str = "barrier") -> None:
        """Return once every rank has come here. All ranks must call it."""
        self.all_gather(None, what)

    def _post(self, payload: bytes, peer: int, tag: int) -> list[Handle]:
        size = np.array([len(payload)], np.int64)
        data = np.frombuffer(payload, np.uint8)
        return [self.send(size, peer, tag), self.send(data, peer, tag)]

    def _finish(self, handles: Sequence[Handle], what: str, peer: int) -> None:
        me = self.name(self.rank)
        for handle in handles:
            self.wait(handle, lambda: f"{me}, {what}, sending to {self.name(peer)}")
