"""Name a rank's work, its wait, and its failure.

Peers name the activity of a rank that they lose; its own errors say where it stood.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardmlx.distributed.messages import PeerLost


class Activity:
    """The activity of the rank called ``name``, such as ``step 12, stage 1, 1F3``.

    The main thread writes it; any thread may read it. ``failure`` is the reason why the rank cannot
    go on.
    """

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        self._name = name
        self._doing = "starting"
        self._waiting: Callable[[], str] | None = None

    def __str__(self) -> str:
        return self._doing

    def begin(self, what: str) -> None:
        """Set the rank's work from now on."""
        self._doing = what

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
        return waiting() if waiting else f"{self._name}, {self._doing}"

    def check(self, what: Callable[[], str]) -> None:
        """Raise ``failure`` if there is one; a ``PeerLost`` names ``what`` this rank does."""
        failure = self.failure
        if isinstance(failure, PeerLost):
            raise PeerLost(f"{what()}: {failure}") from failure
        if failure is not None:
            raise failure
