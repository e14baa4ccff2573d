"""How ranks exchange arrays: the interface.

Every wait is bounded: it ends with ``TransportTimeout``, which names what it waited for.
"""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.compat import view_of

Array = mx.array | np.ndarray
"""What can be sent: only its buffer counts."""

OBJECT_TAG = 0
"""Tag of objects on the main thread."""

CHECKPOINT_TAG = 1
"""Tag of all that the thread sends which writes checkpoints."""

BATCH_TAG = 2
"""Tag of the batches, and of what comes with them."""

FIRST_ENGINE_TAG = 3


_patience = threading.local()
"""How long this thread may wait, beyond the transport's own timeout."""


class TransportError(RuntimeError):
    """Something failed elsewhere, and this rank has noticed."""


class TransportTimeout(TransportError):
    """A message that was waited for did not come in time."""


class PeerLost(TransportError):
    """Another rank has died, or gives no sign of life."""


class Handle:
    """A message under way. ``done`` becomes true once the array may be used again.

    ``error`` is set instead where the message failed, for whoever waits for it.
    """

    __slots__ = ("array", "done", "error")

    def __init__(self, array: Array, done: bool = False) -> None:
        self.array = array  # keeps the buffer alive until the message is through
        self.done = done
        self.error: Exception | None = None


def buffer_of(array: Array) -> memoryview:
    """The bytes of an evaluated, row-contiguous array: no copy, writable."""
    view = view_of(array)
    if array.size == 0:
        return memoryview(bytearray())
    if not view.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous: it cannot be sent")
    return view.cast("B")


def in_a_row(array: mx.array) -> mx.array:
    """An evaluated array as it can be sent: itself if it is contiguous, which takes no time."""
    if not view_of(array).c_contiguous:
        array = mx.contiguous(array)
        mx.eval(array)
    return array


def new_buffer(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An evaluated array of its own, to be filled by a message or from a file."""
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    return array


def check_sum(array: mx.array) -> None:
    """Raise ``ValueError`` unless transports sum arrays of this type."""
    if array.dtype != mx.float32:
        raise ValueError(f"sums are in float32, not {array.dtype}")


class Transport(ABC):
    """Point-to-point messages and sums on evaluated ``mx.array`` between ``size`` ranks.

    Messages with the same (sender, receiver, tag) arrive in the order in which they were sent.
    Sends and receives return at once; ``wait`` ends one. A rank sends no message to itself.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    timeout: float
    library: str | None = None
    """What carries the messages, such as ``Open MPI v5.0.11``."""

    failure: Exception | None = None
    activity: str = "starting"
    """What this rank does now, such as ``step 12, stage 1, 1F3``: its peers name it if they lose
    sight of the rank."""

    last_words: Callable[[str], None] = staticmethod(lambda reason: None)
    """Called, on any thread and if there is time, before this process is ended for ``reason``."""

    _waiting: Callable[[], str] | None = None

    @abstractmethod
    def send(self, array: Array, peer: int, tag: int) -> Handle:
        """Start sending; ``array`` must stay unchanged until the handle is done."""

    @abstractmethod
    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        """Start receiving straight into the buffer of ``array``, which fixes shape and dtype."""

    @abstractmethod
    def all_reduce(self, array: mx.array, group: Sequence[int]) -> Handle:
        """Start summing a float32 ``array`` in place over ``group``, the same on all its ranks.

        The ranks of a group start their sums in the same order.
        """

    def join(self, group: Sequence[int]) -> None:  # noqa: B027 - most need no preparation
        """Make ``group`` known before its first sum; waits for all its ranks."""

    @abstractmethod
    def progress(self, handle: Handle, seconds: float) -> bool:
        """Drive ``handle`` for at most ``seconds``; whether it is done. Raises its error."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the job on all ranks. Called by a rank that failed; its peers wait for ever."""

    def set_timeout(self, seconds: float) -> None:
        """From now on messages may take so long."""
        self.timeout = seconds

    def close(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Release what the transport holds; all its messages are done."""

    def fail(self, error: Exception) -> None:
        """Called on any thread: this rank cannot go on. The main thread's next wait raises
        ``error``; if it comes to none soon, the job ends all the same."""
        self.failure = error

    def stop_requested(self) -> int | None:
        """On rank 0, the number of a signal that asked some rank to stop; None without, and on
        the other ranks."""
        return None

    def stop_command(self) -> str | None:
        """What to type on this host so that the run stops in order; None where it is not known,
        or where Ctrl-C does."""
        return None

    def wait(self, handle: Handle, what: Callable[[], str]) -> None:
        """End a message; ``what`` says, if it times out, what was waited for."""
        self.check(what)
        if handle.done:
            return
        seconds = max(self.timeout, getattr(_patience, "seconds", 0.0))
        with self._waits(what):
            try:
                done = self.progress(handle, seconds)
            except PeerLost as error:
                raise PeerLost(f"{what()}: {error}") from error
        if done:
            return
        self.check(what)
        raise TransportTimeout(f"{what()}: nothing came for {seconds:g} s (see --timeout)")

    @contextmanager
    def _waits(self, what: Callable[[], str]) -> Iterator[None]:
        # What a thread in the background waits for holds nobody up. After an error it stays as it
        # is: that is where this rank came to.
        on_main = threading.current_thread() is threading.main_thread()
        if on_main:
            self._waiting = what
        yield
        if on_main:
            self._waiting = None

    def check(self, what: Callable[[], str]) -> None:
        """Raise ``failure`` if there is one; a lost peer with ``what`` this rank does."""
        if isinstance(self.failure, PeerLost):
            raise PeerLost(f"{what()}: {self.failure}") from self.failure
        if self.failure is not None:
            raise self.failure

    def where(self) -> str:
        """What this rank waits for, or does, with its name."""
        waiting = self._waiting
        return waiting() if waiting else f"{self.name(self.rank)}, {self.activity}"

    @contextmanager
    def longer_timeout(self, seconds: float) -> Iterator[None]:
        """Waits of this thread may last at least so long inside: for work whose time disk and
        network decide."""
        usual = getattr(_patience, "seconds", 0.0)
        _patience.seconds = max(usual, seconds)
        try:
            yield
        finally:
            _patience.seconds = usual

    # Collectives on Python objects, for all that is small and not in the hot path. Objects are
    # pickled: the ranks of one job trust each other.

    def send_object(self, value: Any, peer: int, what: str = "send", tag: int = OBJECT_TAG) -> None:
        """Send one Python object; returns once it is on its way."""
        self._finish(self._post_object(pickle.dumps(value), peer, tag), what, peer)

    def _post_object(self, payload: bytes, peer: int, tag: int = OBJECT_TAG) -> list[Handle]:
        size = np.array([len(payload)], np.int64)
        data = np.frombuffer(payload, np.uint8)
        return [self.send(size, peer, tag), self.send(data, peer, tag)]

    def receive_object(self, peer: int, what: str = "receive", tag: int = OBJECT_TAG) -> Any:
        """The next object from ``peer``."""
        me = self.name(self.rank)

        def come(array: np.ndarray) -> np.ndarray:
            handle = self.receive(array, peer, tag)
            self.wait(handle, lambda: f"{me}, {what}, waiting for {self.name(peer)}")
            return array

        (size,) = come(np.empty(1, np.int64))
        return pickle.loads(buffer_of(come(np.empty(size, np.uint8))))

    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        """The root's ``value``, on every rank."""
        if self.rank != root:
            return self.receive_object(root, what)
        payload = pickle.dumps(value)
        posted = [(p, self._post_object(payload, p)) for p in range(self.size) if p != root]
        for peer, handles in posted:
            self._finish(handles, what, peer)
        return value

    def gather(self, value: Any, root: int = 0, what: str = "gather") -> list[Any] | None:
        """The values of all ranks, by rank, on the root; None elsewhere."""
        if self.rank != root:
            self.send_object(value, root, what)
            return None
        return [
            value if peer == root else self.receive_object(peer, what) for peer in range(self.size)
        ]

    def all_gather(self, value: Any, what: str = "all-gather") -> list[Any]:
        """The values of all ranks, by rank, on every rank."""
        values: list[Any] = self.broadcast(self.gather(value, what=what), what=what)
        return values

    def barrier(self, what: str = "barrier") -> None:
        """Return once every rank has come here."""
        self.all_gather(None, what)

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"

    def _finish(self, handles: Sequence[Handle], what: str, peer: int) -> None:
        me = self.name(self.rank)
        for handle in handles:
            self.wait(handle, lambda: f"{me}, {what}, sending to {self.name(peer)}")
