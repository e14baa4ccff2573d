"""Runs one mpirun, and forwards signals that stop it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardmlx.common.environment import LAUNCHED, TERMINAL
from shardmlx.distributed.processes import SECONDS_BETWEEN_SIGNALS, SIGNALS_THAT_END, process_state
from shardmlx.errors import Stopped

ASK_TO_STOP = signal.SIGUSR1
"""Signal that mpirun forwards to all ranks while it runs on. SIGTERM and SIGINT would kill them:
PRRTE 3 sends SIGTERM, and SIGKILL half a second later, a time that no option sets."""

SECONDS_TO_SAVE = 120  # for the ranks to save and leave in order, before they are killed
SECONDS_ALONE = 20.0  # that mpirun may have no rank on its host: not yet, or no more

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobControl:
    """The way a job is stopped: ``in_order``, within ``seconds``, or in mpirun's way. If it
    ``streams``, rank 0 writes to the terminal itself: mpirun holds each line to its end."""

    in_order: bool = True
    seconds: float = SECONDS_TO_SAVE
    reads_stdin: bool = False
    streams: bool = False


class Supervisor:
    """Runs processes, one after the other, and forwards signals.

    If the job is stopped in order, the first signal asks its ranks to leave; a second one, or the
    end of its time, makes mpirun end them, and the next ends mpirun. Other jobs' mpirun gets the
    signal itself. A signal between processes raises ``Stopped``.
    """

    def __init__(self, control: JobControl | None = None) -> None:
        self.stopped_by: int | None = None
        self._control = control or JobControl()
        # mpirun reads a terminal only in the terminal's own session, where Ctrl-C reaches both.
        self._shares_terminal = self._control.reads_stdin and os.isatty(0)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_starting = False
        self._steps: Iterator[int] = iter((ASK_TO_STOP, signal.SIGTERM))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals in the block; ignored ones (nohup) stay ignored."""
        numbers = [n for n in STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
        before = {n: signal.signal(n, self._stop) for n in (*numbers, signal.SIGALRM)}
        try:
            yield
        finally:
            signal.alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], mark: Path, *, ranks_here: bool = False) -> int:
        """Run a command, whose ranks get ``mark``; return its status as a shell counts. An mpirun
        all of whose ranks were its children, ``ranks_here``, is ended once they are gone."""
        self._is_starting = True
        # In a session of its own, mostly: a terminal sends Ctrl-C to all processes of a group, but
        # only this one is to get it.
        with subprocess.Popen(
            command,
            env=os.environ | {LAUNCHED: str(mark)} | self._terminal(),
            stdin=None if self._control.reads_stdin else subprocess.DEVNULL,
            start_new_session=not self._shares_terminal,
        ) as process:
            self._process = process
            self._is_starting = False
            if self.stopped_by is not None:  # while it started
                self._signal_next()
            ended = threading.Event()
            if ranks_here:
                threading.Thread(target=_end_alone, args=(process, ended), daemon=True).start()
            status = process.wait()
            ended.set()
        self._process = None
        signal.alarm(0)
        return 128 - status if status < 0 else status

    def _terminal(self) -> dict[str, str]:
        """Return the variable that gives this process's terminal to rank 0, if it needs it."""
        with contextlib.suppress(OSError):  # stdout is no terminal, or closed
            return {TERMINAL: os.ttyname(1)} if self._control.streams else {}
        return {}

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        if self.stopped_by is None:
            self.stopped_by = number
            if not self._control.in_order:
                self._steps = iter((number, signal.SIGTERM))
        if self._shares_terminal and number == signal.SIGINT and self._process is not None:
            return
        if self._process is not None:
            self._signal_next()
        elif not self._is_starting:
            raise Stopped(self.stopped_by, "asked to stop")

    def _signal_next(self) -> None:
        if self._process is None:
            return
        number = next(self._steps, signal.SIGKILL)
        if number is ASK_TO_STOP:
            _say("launch: asked all ranks to save and stop; a second signal ends them at once")
            signal.alarm(math.ceil(self._control.seconds))
        elif number != signal.SIGKILL:
            _say("launch: ending all ranks")
        self._process.send_signal(number)


def _end_alone(process: subprocess.Popen[bytes], ended: threading.Event) -> None:
    """End a process whose children have all ended, and whose output is read, after a while."""
    alone = 0
    while alone < SECONDS_ALONE:
        if ended.wait(1.0):
            return
        alone = 0 if _has_child(process.pid) or not _is_read() else alone + 1
    _say("launch: all ranks have ended, and mpirun has not: ending it")
    for number in SIGNALS_THAT_END:
        process.send_signal(number)
        if ended.wait(SECONDS_BETWEEN_SIGNALS):
            return


def _has_child(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(process_state(c.pid) != "gone" for c in psutil.Process(pid).children())
    return False


def _is_read() -> bool:
    """Return whether this process's output accepts more: until then mpirun holds lines back."""
    with contextlib.suppress(OSError):  # one of them is closed
        return select.select([], [1, 2], [], 0)[1] == [1, 2]
    return True


def _say(text: str) -> None:
    # Not print, which the signal may have interrupted.
    os.write(2, f"{text}\n".encode())
