"""The lines that a user types to ``chat``: edited at a terminal, or from a pipe or a file.

mpirun keeps each line that a rank writes to its end, so rank 0 writes to the terminal itself. Keys
reach rank 0 through mpirun, which passes on at once what it reads from the terminal. Where stdin is
a pipe or a file, launch passes on its end; of another mpirun silence is taken for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.input.typeahead import clear_typeahead, store_typeahead
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import DummyContext

from shardmlx.common.formatting import without_controls
from shardmlx.common.passed_stdin import StdinReader
from shardmlx.distributed.processes import find_mpirun, open_file, under_mpirun

SECONDS_OF_SILENCE = 2.0  # after which silence is taken for the end of a pipe or a file
SHOWN = 30  # bytes of a line that cannot be read
SECONDS_BETWEEN_CALLS = 1.0  # between two calls of ``meanwhile`` while nobody types

_TAKE_KEYS = """
saved=$(stty -g <&2)
stty -icanon -echo -iexten intr undef susp undef min 1 time 0 <&2
echo
cat
exec stty "$saved" <&2
"""
"""Shell script that has the terminal, its stderr, pass on each key until this process ends."""


class PipedLines:
    """Lines of a file descriptor, whose silence may mean its end: by default where mpirun reads
    from a pipe or a file. ``prompt`` is printed for each. Where they are ``typed``, by default at a
    terminal, an empty one interrupts."""

    def __init__(
        self,
        fd: int = 0,
        ends_in_silence: bool | None = None,
        *,
        prompt: str = "",
        typed: bool | None = None,
    ) -> None:
        self._source = StdinReader(fd)
        self._prompt = prompt
        source = _launcher_file(0)
        is_terminal = str(source).startswith(("/dev/pts", "/dev/tty", "/dev/console"))
        if ends_in_silence is None:
            ends_in_silence = source is not None and not is_terminal
        if typed is None:  # under an mpirun of which nothing is known, somebody may be there
            typed = is_terminal if source is not None else under_mpirun() or os.isatty(fd)
        self._ends_in_silence = ends_in_silence
        self._typed = typed
        self._incomplete = b""
        self._lines: deque[str] = deque()
        self._is_open = True

    @property
    def help(self) -> str:
        """The keys and words that do something."""
        first = "- 'q' to leave, 'r' to begin anew, 'h' for this help"
        return f"{first}\n- Enter while the model answers makes it stop" if self._typed else first

    def ask(self, meanwhile: Callable[[], None]) -> str | None:
        """Return the next line; None at the end. ``meanwhile`` is called every second."""
        print(self._prompt, end="", flush=True)
        heard = time.monotonic()
        while self._is_open and not self._lines:
            if self._read(SECONDS_BETWEEN_CALLS):
                heard = time.monotonic()
            elif self._is_over(time.monotonic() - heard):
                self._end()
            else:
                meanwhile()
        return self._lines.popleft() if self._lines else None

    def interrupts(self) -> bool:
        """Return whether an empty line was typed while nobody was asked. Other lines wait, and so
        do all of a pipe or a file, whose lines come at once."""
        if self._is_open:
            self._read(0.0)
        if not self._typed or self._source.tells_end:
            return False
        empty = next((line for line in self._lines if not line.strip()), None)
        if empty is not None:
            self._lines.remove(empty)
        return empty is not None

    def show(self, text: str) -> None:
        """Print a part of an answer."""
        print(text, end="", flush=True)

    def dimmed(self, text: str) -> str:
        """Return a text that is not an answer, as it is to be printed."""
        return text

    def close(self) -> None:
        """Do nothing: nothing was changed."""

    def _read(self, seconds: float) -> bool:
        """Return whether anything has come within ``seconds``, the end included."""
        data = self._source.read(seconds)
        if data is None:
            return False
        *whole, self._incomplete = (self._incomplete + data).split(b"\n")
        for line in whole:
            self._add(line)
        if not data:
            self._end()
        return True

    def _is_over(self, silence: float) -> bool:
        """Return whether so many seconds of silence are the end; say so then."""
        hides_end = self._ends_in_silence and not self._source.tells_end
        if not hides_end or silence <= SECONDS_OF_SILENCE:
            return False
        print(
            f"shardmlx: chat ends: nothing more came from stdin within {SECONDS_OF_SILENCE:g} s, "
            "and mpirun does not tell its end (shardmlx launch does)",
            file=sys.stderr,
            flush=True,
        )
        return True

    def _end(self) -> None:
        self._is_open = False
        if self._incomplete:
            self._add(self._incomplete)

    def _add(self, line: bytes) -> None:
        try:
            self._lines.append(line.decode().rstrip("\r"))
        except UnicodeDecodeError as error:
            shown = line[:SHOWN].decode(errors="replace")
            print(
                f"shardmlx: a line is passed over, since it is not UTF-8 text: {shown!r} ({error})",
                file=sys.stderr,
                flush=True,
            )


class TerminalLines:
    """Lines that prompt_toolkit edits at the terminal of ``path``; all that this process prints
    goes there too. After ``close``, or when this process ends, it is as it was before."""

    help = """\
- 'q' or Ctrl-D to leave, 'r' to begin anew, 'h' for this help
- Ctrl-C stops the answer; the arrows edit a line and bring back earlier ones
- Ctrl-\\ ends the job at once"""

    def __init__(self, path: str, prompt: str) -> None:
        self._has_style = "NO_COLOR" not in os.environ
        # Ranks are in the background of mpirun's terminal, which may stop those that write.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _TAKE_KEYS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=terminal,
            start_new_session=True,  # so that no key and no signal of a terminal ends it
        )
        assert self._guard.stdout is not None, "it is a pipe"
        self._guard.stdout.readline()
        os.dup2(terminal, 1)
        os.close(terminal)
        self._input = _ForwardedKeys()
        self._typed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        output = Vt100_Output.from_pty(sys.stdout)
        output.enable_cpr = False  # an answer to a request for the cursor's position would be a key
        self._session: PromptSession[str] = PromptSession(
            [("bold" if self._has_style else "", prompt)],
            input=self._input,
            output=output,
            key_bindings=_key_bindings(),
            multiline=True,
        )

    def ask(self, meanwhile: Callable[[], None]) -> str | None:
        """Return what the user types; call ``meanwhile`` while nothing comes."""
        # On the main thread prompt_toolkit would replace the job's handlers of signals.
        threading.Thread(target=self._prompt, daemon=True).start()
        while True:
            try:
                return self._typed.get(timeout=SECONDS_BETWEEN_CALLS)
            except queue.Empty:
                meanwhile()

    def interrupts(self) -> bool:
        """Return whether Ctrl-C was pressed while nobody was asked. Other keys wait."""
        keys = self._input.read_keys()
        if any(each.key == Keys.ControlC for each in keys):
            clear_typeahead(self._input)
            return True
        store_typeahead(self._input, keys)
        return False

    def show(self, text: str) -> None:
        """Print a part of an answer."""
        # Escape sequences are shown, not obeyed.
        print(without_controls(text), end="", flush=True)

    def dimmed(self, text: str) -> str:
        """Return a text that is shown dimmed where the terminal can."""
        return f"\x1b[2m{text}\x1b[0m" if self._has_style else text

    def close(self) -> None:
        """Give the terminal back as it was."""
        self._session.output.disable_bracketed_paste()
        with contextlib.suppress(OSError):  # the terminal's window was closed
            self._session.output.flush()
        self._guard.communicate()

    def _prompt(self) -> None:
        line = None
        try:
            with contextlib.suppress(EOFError):
                line = self._session.prompt()
        finally:
            self._typed.put(line)


class _ForwardedKeys(Vt100Input):
    """The keys of a terminal that come through stdin, a pipe under mpirun."""

    def __init__(self) -> None:
        stdin: Any = SimpleNamespace(fileno=lambda: 0, isatty=lambda: True, encoding="utf-8")
        super().__init__(stdin)

    def raw_mode(self) -> DummyContext:
        """Leave the terminal's mode as it is."""
        return DummyContext()

    cooked_mode = raw_mode


def _key_bindings() -> KeyBindings:
    """Return the bindings of Enter, which ends pasted lines too, and of Ctrl-C, which clears."""
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        event.current_buffer.history_forward(sys.maxsize)
        event.current_buffer.text = ""

    return keys


def find_terminal() -> str | None:
    """Return the path of the terminal that mpirun reads from and writes to; this process's own
    without mpirun. None where it is a pipe or a file, or on another host."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    if not under_mpirun():
        return os.ttyname(0) if os.isatty(0) and os.isatty(1) else None
    read = _launcher_file(0)
    if read is None or read != _launcher_file(1) or not read.startswith("/dev/"):
        return None
    try:
        terminal = os.open(read, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None
    is_terminal = os.isatty(terminal)
    os.close(terminal)
    return read if is_terminal else None


def _launcher_file(fd: int) -> str | None:
    """Return what mpirun reads from or writes to; None where that is unknown."""
    launcher = find_mpirun()
    return None if launcher is None else open_file(launcher.process.pid, fd)
