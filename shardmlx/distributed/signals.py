"""Handle signals at once, even while the main thread computes in C for minutes.

Python runs its handlers on the main thread between two bytecodes, but writes to the wakeup file
descriptor as soon as the signal comes.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to stop. mpirun forwards SIGUSR1, and kills soon after the others. SIGHUP
comes to a process without mpirun whose terminal is closed."""


SECONDS_OF_HANGING_UP = 2.0
"""Seconds in which all signals of a closed terminal come: the kernel and the shell both send
SIGHUP, and bash sends a stopped job SIGTERM as well."""


class Signals:
    """Signals that this process was sent: those that ask it to stop, and SIGCONT.

    Must be made on the main thread; elsewhere only ``wait`` and ``wake`` do anything.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._hung_up = -math.inf
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            numbers = [*STOPS, signal.SIGCONT]
            if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
                numbers.remove(signal.SIGHUP)
            self._before = {number: signal.signal(number, _ignore) for number in numbers}
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> list[int]:
        """Return the signals that come within ``seconds``; return early at a signal or ``wake``."""
        if not select.select([self._read], [], [], seconds)[0]:
            return []
        return [number for number in os.read(self._read, 512) if number and self._counts(number)]

    def _counts(self, number: int) -> bool:
        """Return False for a signal of one and the same end of a terminal."""
        again = time.monotonic() - self._hung_up < SECONDS_OF_HANGING_UP
        if number == signal.SIGHUP:
            self._hung_up = time.monotonic()
        return not (again and number in (signal.SIGHUP, signal.SIGTERM))

    def wake(self) -> None:
        """End the ``wait`` of another thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def close(self) -> None:
        """Restore the earlier handlers, when nobody waits any more."""
        if self._installed:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: with SIG_IGN Python would not write to the wakeup file descriptor."""
