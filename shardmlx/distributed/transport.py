"""The interface through which ranks exchange arrays.

Every wait is bounded: it ends with ``TransportTimeout``, which names what it waited for. Below it
stand ``messages`` (arrays and tags), ``activity`` (a rank's work and wait) and ``collectives``
(Python objects between all ranks); ``mpi`` and ``local_transport`` carry the messages, and ``sums``
adds arrays by them.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardmlx.distributed.activity import Activity
from shardmlx.distributed.collectives import ObjectCollectives
from shardmlx.distributed.messages import Handle, PeerLost, TransportTimeout

_longer = threading.local()
"""Seconds that this thread may wait, if longer than the transport's own timeout."""


class Transport(ObjectCollectives):
    """Point-to-point messages on evaluated ``mx.array`` between ``size`` ranks.

    Messages with the same (sender, receiver, tag) arrive in the order in which they were sent.
    Sends and receives return at once; ``wait`` ends one. A rank sends no message to itself.
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
    def progress(self, handle: Handle, seconds: float) -> bool:
        """Drive ``handle`` for at most ``seconds``; return whether it is done. Raise its error."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the job on all ranks, after a failure of this one."""

    def close(self) -> None:
        """Release all resources, once all messages are done."""

    def wait(self, handle: Handle, what: Callable[[], str]) -> None:
        """End a message; ``what`` names the wait in a timeout.

        Raises ``TransportTimeout`` after ``patience`` seconds; ``PeerLost`` if the link or the peer
        broke; ``failure`` if there is one.
        """
        self.check(what)
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
        self.check(what)
        raise TransportTimeout(f"{what()}: nothing came for {seconds:g} s (see --timeout)")

    def set_timeout(self, seconds: float) -> None:
        """Set the seconds that a message may take from now on."""
        self.timeout = seconds

    @property
    def patience(self) -> float:
        """Seconds that a wait of this thread may last: ``timeout``, or the time of
        ``longer_timeout``."""
        return max(self.timeout, getattr(_longer, "seconds", 0.0))

    def limit_silence(self, seconds: float) -> None:
        """Take a rank for lost after so many seconds without a sign of life, at the latest. All
        ranks must call it."""

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

    @property
    def failure(self) -> Exception | None:
        """Reason why this rank cannot go on; None while it can."""
        return self.activity.failure

    def fail(self, error: Exception) -> None:
        """Note, on any thread, that this rank cannot go on.

        The main thread's next wait raises ``error``; without a wait soon, the job ends all the
        same. Only the first failure counts.
        """
        if self.activity.failure is None:
            self.activity.failure = error

    def check(self, what: Callable[[], str]) -> None:
        """Raise ``failure`` if there is one; a lost peer names ``what`` this rank does."""
        self.activity.check(what)

    def stop_requested(self) -> int | None:
        """Return, on rank 0, the number of a signal that asked some rank to stop.

        None without a signal, and on the other ranks.
        """
        return None

    def stop_command(self) -> str | None:
        """Return the shell command for this host that stops the run in order.

        None if it is unknown, or if Ctrl-C does.
        """
        return None
