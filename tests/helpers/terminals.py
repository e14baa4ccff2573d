"""A person at a terminal: a pty in which a program runs, what it shows, and what is typed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from testbed.jobs import Running, patience

SECONDS = 60.0
"""Time for what must come."""


class Terminal:
    """A program at a terminal of its own, with 80 columns."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self._ours, self._its = os.openpty()
        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._settings = termios.tcgetattr(self._its)
        self._shown = ""
        self._seen = 0
        self.running = Running(command, env={"TERM": "xterm"}, terminal=self._its)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.running.__exit__()
        os.close(self._ours)
        os.close(self._its)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Wait until it shows what matches, after what was waited for before; return the match."""
        end = time.monotonic() + patience(SECONDS)
        while not (found := re.compile(pattern).search(self._shown, self._seen)):
            if time.monotonic() > end:
                raise AssertionError(f"{pattern!r} does not come\n{self._shown}")
            self._read(0.1)
        self._seen = found.end()
        return found[0]

    def end(self) -> tuple[int | None, str]:
        """Wait for the program's end; return its status, and all that it has shown."""
        end = time.monotonic() + patience(SECONDS)
        while self.running.process.poll() is None and time.monotonic() < end:
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.running.wait(1), self._shown

    def is_as_before(self) -> bool:
        """Tell whether the terminal has the settings that it had at first."""
        return termios.tcgetattr(self._its) == self._settings

    def becomes_as_before(self) -> bool:
        """Tell whether it gets these settings within ten seconds: what puts them back after a kill
        is a process of its own."""
        end = time.monotonic() + patience(10)
        while not self.is_as_before() and time.monotonic() < end:
            time.sleep(0.05)
        return self.is_as_before()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        with contextlib.suppress(OSError):
            self._shown += os.read(self._ours, 1 << 16).decode(errors="replace")
        return True
