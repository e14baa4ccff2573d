"""The interface through which ranks exchange arrays, and Python objects outside the hot path.

Every wait is bounded: it ends with ``TransportTimeout``, which names what it waited for. Objects
are pickled: the ranks of one job trust each other. ``mpi`` carries the messages, and ``sums`` adds
arrays by them.
"""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardmlx.distributed.messages import Array, Handle, PeerLost, TransportTimeout, buffer_of
from shardmlx.distributed.tags import OBJECT_TAG

_longer = threading.local()
"""Seconds that this thread may wait, if longer than the transport's own timeout."""


class Activity:
    """The activity of the rank called ``name``, such as ``step 12, stage 1, 1F3``.

    Peers name the activity of a rank that they lose; its own errors say where it stood. The main
    thread writes it; any thread may read it. ``failure`` is the reason why the rank cannot go on.
    """

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        self._name = name
        self._doing: str | Callable[[], str] = "starting"
        self._waiting: Callable[[], str] | None = None

    def __str__(self) -> str:
        return self._doing if isinstance(self._doing, str) else self._doing()

    def begin(self, what: str | Callable[[], str]) -> None:
        """Set the rank's work from now on, or what says it, on any thread."""
        self._doing = what

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Set the rank's work for a block that may name it more closely: then that stays. After an
        error ``what`` stays, as the place of the failure."""
        before = self._doing
        self.begin(what)
        yield
        if self._doing == what:
            self._doing = before

    @contextmanager
    def waiting_for(self, what: Callable[[], str]) -> Iterator[None]:
        """Name ``what`` as this rank's wait inside the block.

        Only waits of the main thread count, since others hold nobody up. After an error ``what``
        stays, as the place of the failure.
        """
        on_main = threading.current_thread() is threading.main_thread()
        if on_main:
            self._waiting = what
        yield
        if on_main:
            self._waiting = None

    @property
    def is_waiting(self) -> bool:
        """True while the main thread waits for another rank."""
        return self._waiting is not None

    def where(self) -> str:
        """Return the wait of this rank, or else its activity, with its name."""
        waiting = self._waiting
        return waiting() if waiting else f"{self._name}, {self}"

    def fail(self, error: Exception) -> None:
        """Set ``failure``, unless there is one."""
        self.failure = self.failure or error

    def check(self, what: Callable[[], str], failure: Exception | None = None) -> None:
        """Raise the failure of a thread, or ``failure``, if there is one; a ``PeerLost`` names
        ``what`` this rank does."""
        failure = failure or self.failure
        if isinstance(failure, PeerLost):
            raise PeerLost(f"{what()}: {failure}") from failure
        if failure is not None:
            raise failure


class Transport(ABC):
    """Point-to-point messages on evaluated ``mx.array`` between ``size`` ranks.

    Messages with the same (sender, receiver, tag) arrive in the order in which they were sent.
    Sends and receives return at once; ``wait`` ends one. A rank sends no message to itself. All
    ranks must call ``broadcast``, ``gather``, ``all_gather`` and ``barrier``, in the same order;
    their timeouts name the step ``what``.
    """

    library: str | None = None
    """Name of the message library, such as ``Open MPI v5.0.11``."""

    on_abort: Callable[[str], None] = staticmethod(lambda reason: None)
    """Function called, on any thread and if there is time, before this process is ended for
    ``reason``."""

    def __init__(self, rank: int, hosts: Sequence[str], timeout: float) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.hosts = tuple(hosts)
        self.timeout = timeout
        self.activity = Activity(self.name(rank))

    @abstractmethod
    def send(self, array: Array, peer: int, tag: int) -> Handle:
        """Start sending; ``array`` must stay unchanged until the handle is done."""

    @abstractmethod
    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        """Start receiving straight into the buffer of ``array``, which fixes shape and dtype."""

    @abstractmethod
    def progress(self, handle: Handle, seconds: float) -> bool:
        """Drive ``handle`` for at most ``seconds``; return whether it is done. Raise its error."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the job on all ranks, after a failure of this one."""

    def close(self) -> None:  # noqa: B027 - some have nothing to release
        """Release all resources, once all messages are done."""

    def wait(self, handle: Handle, what: Callable[[], str]) -> None:
        """End a message; ``what`` names the wait in a timeout.

        Raises ``TransportTimeout`` after ``patience`` seconds; ``PeerLost`` if the link or the peer
        broke; ``failure`` if there is one.
        """
        self.activity.check(what)
        if handle.done:
            return
        seconds = self.patience
        with self.activity.waiting_for(what):
            try:
                done = self.progress(handle, seconds)
            except PeerLost as error:
                raise PeerLost(f"{what()}: {error}") from error
        if done:
            return
        self.activity.check(what)
        raise TransportTimeout(f"{what()}: nothing came for {seconds:g} s (see --timeout)")

    def set_timeout(self, seconds: float) -> None:
        """Set the seconds that a message may take from now on."""
        self.timeout = seconds

    @property
    def patience(self) -> float:
        """Seconds that a wait of this thread may last: ``timeout``, or the time of
        ``longer_timeout``."""
        return max(self.timeout, getattr(_longer, "seconds", 0.0))

    def limit_silence(self, seconds: float) -> None:  # noqa: B027 - threads are never silent
        """Take a rank for lost after so many seconds without a sign of life, at the latest:
        the same on all ranks."""

    def quiet_rank(self) -> str | None:
        """Return in words which silent rank is in doubt. Only rank 0 hears all ranks."""
        return None

    @contextmanager
    def longer_timeout(self, seconds: float) -> Iterator[None]:
        """Let waits of this thread last at least so long in the block.

        Meant for work that depends on disk and network.
        """
        usual = getattr(_longer, "seconds", 0.0)
        _longer.seconds = max(usual, seconds)
        try:
            yield
        finally:
            _longer.seconds = usual

    def fail(self, error: Exception) -> None:
        """Note, on any thread, that this rank cannot go on.

        The main thread's next wait raises ``error``; without a wait soon, the job ends all the
        same. Only the first failure counts.
        """
        self.activity.fail(error)

    def stop_requested(self) -> int | None:
        """Return, on rank 0, the number of a signal that asked some rank to stop, if any did."""
        return None

    def stop_command(self) -> str | None:
        """Return the shell command for this host that stops the run in order, if it is known, and
        Ctrl-C does not."""
        return None

    def name(self, rank: int) -> str:
        """Return how messages to the user call a rank."""
        return f"rank {rank} on {self.hosts[rank]}"

    def send_object(self, value: Any, peer: int, what: str = "send", tag: int = OBJECT_TAG) -> None:
        """Send one Python object; return once it is on its way."""
        outbox = Outbox(self)
        outbox.send_object(pickle.dumps(value), peer, tag, what)
        outbox.drain(0)

    def receive_object(self, peer: int, what: str = "receive", tag: int = OBJECT_TAG) -> Any:
        """Return the next object from ``peer``."""
        me = self.name(self.rank)

        def come(array: np.ndarray) -> np.ndarray:
            handle = self.receive(array, peer, tag)
            self.wait(handle, lambda: f"{me}, {what}, waiting for {self.name(peer)}")
            return array

        (size,) = come(np.empty(1, np.int64))
        return pickle.loads(buffer_of(come(np.empty(size, np.uint8))))

    def broadcast(self, value: Any, what: str = "broadcast") -> Any:
        """Return rank 0's ``value``."""
        if self.rank != 0:
            return self.receive_object(0, what)
        payload = pickle.dumps(value)
        outbox = Outbox(self)
        for peer in range(1, self.size):
            outbox.send_object(payload, peer, OBJECT_TAG, what)
        outbox.drain(0)
        return value

    def gather(self, value: Any, what: str = "gather") -> list[Any] | None:
        """Return the values of all ranks, by rank, on rank 0; None elsewhere."""
        if self.rank != 0:
            self.send_object(value, 0, what)
            return None
        return [value, *(self.receive_object(peer, what) for peer in range(1, self.size))]

    def all_gather(self, value: Any, what: str = "all-gather") -> list[Any]:
        """Return the values of all ranks, by rank."""
        values: list[Any] = self.broadcast(self.gather(value, what=what), what=what)
        return values

    def barrier(self, what: str = "barrier") -> None:
        """Return once every rank has come here."""
        self.all_gather(None, what)


@dataclass(slots=True)
class Outbox:
    """Messages of a rank under way, each with the words that name it in an error."""

    transport: Transport
    unsent: deque[tuple[Handle, str]] = field(default_factory=deque)

    def send(self, array: Array, peer: int, tag: int, what: str) -> None:
        """Start to send; ``what`` names this rank's work."""
        me, other = map(self.transport.name, (self.transport.rank, peer))
        what = f"{me}, {what}, sending to {other}"
        self.unsent.append((self.transport.send(array, peer, tag), what))

    def send_object(self, payload: bytes, peer: int, tag: int, what: str) -> None:
        """Start to send a pickled object, which ``receive_object`` returns to the peer."""
        self.send(np.array([len(payload)], np.int64), peer, tag, what)
        self.send(np.frombuffer(payload, np.uint8), peer, tag, what)

    def drain(self, most: int) -> None:
        """Wait until at most so many messages are under way."""
        while self.unsent and (len(self.unsent) > most or self.unsent[0][0].done):
            handle, what = self.unsent.popleft()
            self.transport.wait(handle, partial(str, what))
