"""Names of what a rank does, waits for, and failed with.

Its peers name the activity if they lose sight of the rank; its own errors say where it came to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardmlx.distributed.messages import PeerLost


class Activity:
    """The activity of the rank called ``name``, such as ``step 12, stage 1, 1F3``.

    The main thread writes it; any thread may read it. ``failure`` is why the rank cannot go on.
    """

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        self._name = name
        self._doing = "starting"
        self._waiting: Callable[[], str] | None = None

    def __str__(self) -> str:
        return self._doing

    def begin(self, what: str) -> None:
        """Set what the rank does from now on."""
        self._doing = what

    @contextmanager
    def waiting_for(self, what: Callable[[], str]) -> Iterator[None]:
        """Let ``what`` say, inside, where this rank is.

        A wait of another thread than the main one holds nobody up and is left out. After an error
        ``what`` stays, because that is where this rank came to.
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
        """Return what this rank waits for, or else does, with its name."""
        waiting = self._waiting
        return waiting() if waiting else f"{self._name}, {self._doing}"

    def check(self, what: Callable[[], str]) -> None:
        """Raise ``failure`` if there is one; a ``PeerLost`` with ``what`` this rank does."""
        failure = self.failure
        if isinstance(failure, PeerLost):
            raise PeerLost(f"{what()}: {failure}") from failure
        if failure is not None:
            raise failure
