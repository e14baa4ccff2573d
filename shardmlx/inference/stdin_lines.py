"""Read lines that are typed, without blocking.

mpirun of Open MPI 5 passes on to rank 0 what is typed, but not that it ends (openpmix/openpmix,
pull request 4024): where it reads from a pipe or a file, silence is taken for the end.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque

from shardmlx.distributed.processes import find_mpirun, open_file

SECONDS_OF_SILENCE = 2.0
"""Seconds after which silence is taken for the end of a pipe or a file."""


HELP = """\
- 'q' to leave, 'r' to begin anew, 'h' for this help
- Enter while the model answers makes it stop"""


class TypedLines:
    """Lines of a file descriptor: a terminal's, unless it ``ends_in_silence``.

    ``prompt`` is printed for each of them.
    """

    help = HELP

    def __init__(
        self, fd: int = 0, ends_in_silence: bool | None = None, *, prompt: str = ""
    ) -> None:
        self._fd = fd
        self._prompt = prompt
        self._ends_in_silence = (
            _launcher_reads_no_terminal() if ends_in_silence is None else ends_in_silence
        )
        self._begun = b""
        self._lines: deque[str] = deque()
        self._heard = time.monotonic()
        self._open = True

    @property
    def is_open(self) -> bool:
        """True while lines are there, or may come."""
        return self._open or bool(self._lines)

    def ask(self) -> None:
        """Print the prompt, and begin to wait."""
        print(self._prompt, end="", flush=True)
        self.rest()

    def show(self, text: str) -> None:
        """Print a part of an answer."""
        print(text, end="", flush=True)

    def aside(self, text: str) -> str:
        """Return a text that is no answer, as it shall be shown."""
        return text

    def close(self) -> None:
        """Do nothing: nothing was changed."""

    def next(self, seconds: float) -> str | None:
        """Return the next line without its line end; None if none comes within ``seconds``."""
        end = time.monotonic() + seconds
        while not self._lines and self._open:
            self._read(max(0.0, end - time.monotonic()))
            if time.monotonic() >= end:
                break
        return self._lines.popleft() if self._lines else None

    def interrupts(self) -> bool:
        """Return whether an empty line has come, which nobody asked for. Other lines wait."""
        self.rest()
        if self._open:
            self._read(0.0)
        empty = next((line for line in self._lines if not line.strip()), None)
        if empty is not None:
            self._lines.remove(empty)
        return empty is not None

    def rest(self) -> None:
        """Begin to count silence anew: until now nobody was asked for a line."""
        self._heard = time.monotonic()

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            if self._ends_in_silence and time.monotonic() - self._heard > SECONDS_OF_SILENCE:
                self._close()
            return
        part = os.read(self._fd, 1 << 16)
        self._heard = time.monotonic()
        if not part:
            self._close()
            return
        *whole, self._begun = (self._begun + part).split(b"\n")
        self._lines.extend(map(_text, whole))

    def _close(self) -> None:
        self._open = False
        if self._begun:
            self._lines.append(_text(self._begun))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


def _launcher_reads_no_terminal() -> bool:
    """Return whether mpirun reads its stdin from a pipe or a file; False where that is unknown."""
    launcher = find_mpirun()
    target = None if launcher is None else open_file(launcher.pid, 0)
    if target is None:
        return False
    return not target.startswith(("/dev/pts", "/dev/tty", "/dev/console"))
