"""Lines typed at the terminal at which mpirun was started, edited as they are typed.

mpirun keeps each line that a rank writes to its end, and a terminal keeps each that is typed. So
rank 0 writes to the terminal itself, and has it pass on every key: mpirun reads keys and hands them
on at once. Ctrl-C is such a key, and ends no job.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections import deque
from pathlib import Path

from shardmlx.common.formatting import without_controls
from shardmlx.distributed.processes import find_mpirun, open_file, under_mpirun
from shardmlx.inference import terminal_guard
from shardmlx.inference.line_editor import PASTE_OFF, PASTE_ON, Keys, LineEditor, Signal

HELP = """\
- 'q' or Ctrl-D to leave, 'r' to begin anew, 'h' for this help
- Ctrl-C stops the answer; the arrows edit a line and bring back earlier ones
- Ctrl-\\ ends the job at once"""

_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


class TerminalLines:
    """Lines of a terminal whose keys come from ``fd``; all that is printed goes to it too.

    It is as it was before after ``close``, or when this process ends.
    """

    help = HELP

    def __init__(self, path: str, prompt: str, fd: int = 0) -> None:
        self._fd = fd
        self._in_color = "NO_COLOR" not in os.environ
        self._terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
        # Ranks are in the background of mpirun's terminal, and would be stopped.
        self._before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", terminal_guard.__file__, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._guard.stdout is not None, "it is a pipe"
        self._guard.stdout.readline()
        self._take_keys()
        os.dup2(self._terminal, 1)
        self._keys = Keys()
        self._editor = LineEditor(prompt, self._styled(prompt, _BOLD), self._columns)
        self._events: deque[str] = deque()
        self._is_asked = False
        self._open = True

    @property
    def is_open(self) -> bool:
        """True while lines may come."""
        return self._open

    def ask(self) -> None:
        """Show the prompt, and what has been typed meanwhile."""
        self._is_asked = True
        self._write(PASTE_ON + self._editor.draw())

    def next(self, seconds: float) -> str | None:
        """Return the next line; None if none comes within ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            while self._events:
                if (line := self._press(self._events.popleft())) is not None:
                    return line
            left = end - time.monotonic()
            if left < 0 or not self._open:
                return None
            self._read(left)

    def interrupts(self) -> bool:
        """Return whether Ctrl-C was pressed, while nobody was asked. Other keys wait."""
        self._read(0.0)
        is_pressed = Signal.STOP.value in self._events
        if is_pressed:
            self._events.clear()
        return is_pressed

    def rest(self) -> None:
        """Do nothing: a terminal does not end by silence."""

    def show(self, text: str) -> None:
        """Print a part of an answer. What would steer the terminal is shown, not obeyed."""
        print(without_controls(text), end="", flush=True)

    def aside(self, text: str) -> str:
        """Return a text that is no answer, as the terminal shall show it."""
        return self._styled(text, _DIM)

    def close(self) -> None:
        """Put the terminal back."""
        self._open = False
        self._write(PASTE_OFF)
        self._guard.communicate()
        signal.signal(signal.SIGTTOU, self._before)
        os.close(self._terminal)

    def _take_keys(self) -> None:
        settings = termios.tcgetattr(self._terminal)
        settings[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        controls = settings[6]
        controls[termios.VMIN], controls[termios.VTIME] = 1, 0
        off = os.fpathconf(self._terminal, "PC_VDISABLE").to_bytes(1, "little")
        # Ctrl-\ still sends its signal: for a job that does not listen any more.
        controls[termios.VINTR] = controls[termios.VSUSP] = off
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, settings)

    def _press(self, key: str) -> str | None:
        """Give a key to the editor; return the line that it ends."""
        if key == "\x0c":
            self._write("\x1b[2J\x1b[H")
        drawn = self._editor.leave() if key in "\r\n" else ""
        happened = self._editor.press(key)
        if isinstance(happened, str):
            self._is_asked = False
            self._write(f"{drawn}{PASTE_OFF}\n")
            return happened
        if happened is Signal.LEAVE:
            self._open = False
        elif happened is Signal.STOP:
            self._editor.clear()
        self._write(self._editor.draw())
        return None

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, seconds))
        if not ready:
            return
        data = os.read(self._fd, 1 << 16)
        if not data:
            self._open = False
        self._events.extend(self._keys.take(data))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal's window was closed
            print(text, end="", flush=True)

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._in_color else text

    def _columns(self) -> int:
        with contextlib.suppress(OSError):
            return max(2, os.get_terminal_size(self._terminal).columns)
        return 80


def find_terminal() -> str | None:
    """Return the path of the terminal that mpirun reads from and writes to; this process's own
    without mpirun. None where it is a pipe or a file, or on another host."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    if not under_mpirun():
        return os.ttyname(0) if os.isatty(0) and os.isatty(1) else None
    launcher = find_mpirun()
    if launcher is None or not launcher.is_mpirun:
        return None
    read, written = (open_file(launcher.pid, fd) for fd in (0, 1))
    if read is None or read != written or not read.startswith("/dev/"):
        return None
    try:
        terminal = os.open(read, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None
    is_one = os.isatty(terminal)
    os.close(terminal)
    return read if is_one and Path(read).is_char_device() else None
