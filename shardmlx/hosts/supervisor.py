"""Runs one mpirun, and passes on the signals that are to stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardmlx.common.environment import LAUNCHED
from shardmlx.errors import Stopped
from shardmlx.hosts.restart_policy import status_of

ASK_TO_STOP = signal.SIGUSR1
"""Signal that mpirun passes on to all ranks, on all hosts, and goes on.

At SIGTERM and SIGINT it would kill them: PRRTE 3 sends SIGTERM, and SIGKILL half a second later,
with nothing to set that time by.
"""

SECONDS_TO_SAVE = 120
"""Seconds for the ranks to save and leave in order, before they are killed."""

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs processes, one after the other, and passes on what is to stop this one.

    The first signal asks the ranks to save and leave; a second one, or two minutes, has mpirun end
    them, and the next ends mpirun. While nothing runs, a signal raises ``Stopped``.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_starting = False
        self._steps = iter((ASK_TO_STOP, signal.SIGTERM))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals while inside; those that are ignored (nohup) stay so."""
        numbers = [n for n in _STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
        before = {n: signal.signal(n, self._stop) for n in (*numbers, signal.SIGALRM)}
        try:
            yield
        finally:
            signal.alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], mark: Path) -> int:
        """Run a command, whose ranks are told of ``mark``; return its status as a shell counts."""
        self._is_starting = True
        # In a session of its own: a terminal sends Ctrl-C to all processes of a group, and this
        # one alone shall have it.
        with subprocess.Popen(
            command,
            env=os.environ | {LAUNCHED: str(mark)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            self._process = process
            self._is_starting = False
            if self.stopped_by is not None:  # while it started
                self._signal_next()
            status = process.wait()
        self._process = None
        signal.alarm(0)
        return status_of(status)

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        if self.stopped_by is None:
            self.stopped_by = number
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
            signal.alarm(SECONDS_TO_SAVE)
        elif number is signal.SIGTERM:
            _say("launch: ending all ranks")
        self._process.send_signal(number)


def _say(text: str) -> None:
    # Not print, in which the signal may have come.
    os.write(2, f"{text}\n".encode())
