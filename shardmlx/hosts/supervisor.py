"""Runs one mpirun, and forwards signals that stop it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import psutil

from shardmlx.common.environment import LAUNCHED, TERMINAL, note_stop
from shardmlx.common.hang_up import say_line
from shardmlx.distributed.processes import SECONDS_BETWEEN_SIGNALS, SIGNALS_THAT_END, process_state
from shardmlx.distributed.signals import SECONDS_OF_HANGING_UP
from shardmlx.errors import Stopped
from shardmlx.hosts.output_relay import LastWords, OutputRelay, SaidByRank0

ASK_TO_STOP = signal.SIGUSR1
"""Signal that asks for an ordered stop. Rank 0 gets it, and tells the others: mpirun would forward
its number, which is that of another signal on Linux than on macOS. Where rank 0 is on another
machine, mpirun forwards it. SIGTERM and SIGINT would kill the ranks: PRRTE 3 sends SIGTERM, and
SIGKILL half a second later, a time that no option sets."""

STOPPED_IN_ORDER = frozenset({128 + 10, 128 + 30})
"""Statuses of a job that was asked to stop so: the number of the signal on Linux, and on macOS,
where rank 0 may have run."""

SECONDS_TO_SAVE = 120  # for the ranks to save and leave in order, before they are killed
SECONDS_ALONE = 20.0  # that mpirun may have no rank on its host: not yet, or no more
SECONDS_TO_BEGIN = 30.0  # for logins on other hosts, and rank 0's Python, before launch looks
# Ctrl-\ sends SIGQUIT, and to launch alone: mpirun has a session of its own.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobControl:
    """The way a job is stopped: ``in_order``, within ``seconds``, or in mpirun's way. If it
    ``streams``, rank 0 writes to the terminal itself: mpirun holds each line to its end."""

    in_order: bool = True
    seconds: float = SECONDS_TO_SAVE
    reads_stdin: bool = False
    streams: bool = False


@dataclass(frozen=True, slots=True)
class StartLimit:
    """The ``seconds`` in which mpirun must have started the ranks. ``explain`` is given the seconds
    so far, and returns lines about what may keep it."""

    seconds: float
    explain: Callable[[float], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an mpirun: its status as a shell counts, and its process id. ``too_late`` if it
    was ended at its ``StartLimit``. It says nothing itself if it was ``killed``: the status alone
    may be that of a rank which was killed."""

    status: int
    pid: int
    too_late: bool = False
    killed: bool = False


@dataclass(slots=True)
class _Running:
    """An mpirun that was started. Its ``limit`` is None if all ranks start on this machine;
    ``rank_0_here`` tells whether rank 0 does, whose process is ``rank_0`` once that is known."""

    process: subprocess.Popen[bytes]
    relay: OutputRelay
    said: SaidByRank0
    limit: StartLimit | None
    rank_0_here: bool
    ended: threading.Event
    rank_0: int | None = None
    too_late: bool = False
    signalled: bool = False

    @property
    def hangs(self) -> bool:
        """True while mpirun waits for daemons of other hosts, and obeys no signal."""
        return self.limit is not None and not self.said.has_begun

    def wait(self) -> None:
        """Wait for mpirun's end, and tell all others of it."""
        self.process.wait()
        self.ended.set()

    def ask_to_stop(self) -> None:
        """Ask rank 0 to stop the job in order."""
        rank_0 = self.said.rank_0
        if self.rank_0_here and rank_0 is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank_0, ASK_TO_STOP)
                return
        self.process.send_signal(ASK_TO_STOP)

    def end(self) -> None:
        """End mpirun, which then ends its ranks."""
        for number in SIGNALS_THAT_END:
            self.process.send_signal(number)
            if self.ended.wait(SECONDS_BETWEEN_SIGNALS):
                return

    def end_alone(self) -> None:
        """End mpirun once its ranks have ended, and its output is read, after a while: after a good
        end of all its ranks, too, mpirun may wait for ever."""
        alone = 0
        while alone < SECONDS_ALONE:
            if self.ended.wait(1.0):
                return
            alone = alone + 1 if self._ranks_have_ended() and _is_read() else 0
        say_line("launch: all ranks have ended, and mpirun has not: ending it")
        self.end()

    def _ranks_have_ended(self) -> bool:
        """Return whether no rank runs, as far as this machine can tell: rank 0 ends together with
        the ranks of other hosts, whose logins are mpirun's children as well."""
        if self.limit is None:
            return not _has_child(self.process.pid)
        self.rank_0 = self.said.rank_0 or self.rank_0
        if self.rank_0_here and self.rank_0 is not None:
            return process_state(self.rank_0) == "gone"
        return self.said.status is not None

    def watch_start(self, limit: StartLimit) -> None:
        """Say what may keep mpirun from starting ranks, and end it at its limit."""
        waited = 0.0  # not a clock's time: launch may be stopped meanwhile
        asks_at = min(SECONDS_TO_BEGIN, limit.seconds / 2)
        while waited < limit.seconds:
            if self.ended.wait(1.0) or not self.hangs:
                return
            waited += 1.0
            if waited - 1.0 < asks_at <= waited:
                began = time.monotonic()
                lines = limit.explain(waited)
                waited += time.monotonic() - began
                if self.ended.is_set() or not self.hangs:  # it took long, and a rank has begun
                    return
                for line in lines:
                    say_line(line)
        self.too_late = True
        self.end()


class Supervisor:
    """Runs processes, one after the other, and forwards signals.

    If the job is stopped in order, the first signal asks its ranks to leave; a second one, or the
    end of its time, makes mpirun end them, and the next ends mpirun. Other jobs' mpirun gets the
    signal itself. An mpirun that has not yet started ranks on other hosts is ended at once. A
    signal between processes raises ``Stopped``. Ctrl-Z stops the ranks as well, until launch goes
    on.
    """

    def __init__(self, control: JobControl | None = None) -> None:
        self.stopped_by: int | None = None
        self._control = control or JobControl()
        # mpirun reads a terminal only in the terminal's own session, where Ctrl-C reaches both.
        self._shares_terminal = self._control.reads_stdin and os.isatty(0)
        self._running: _Running | None = None
        self._is_starting = False
        self._pauses_once_started = False
        self._hung_up = -math.inf
        self._steps: Iterator[int] = iter((ASK_TO_STOP, signal.SIGTERM))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals in the block; ignored ones (nohup) stay ignored."""
        handlers = {**dict.fromkeys(STOPPING, self._stop), signal.SIGTSTP: self._pause}
        caught = {n: h for n, h in handlers.items() if signal.getsignal(n) is not signal.SIG_IGN}
        caught[signal.SIGALRM] = self._stop
        before = {n: signal.signal(n, handler) for n, handler in caught.items()}
        try:
            yield
        finally:
            signal.alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(
        self,
        command: Sequence[str],
        said: SaidByRank0,
        *,
        rank_0_here: bool = True,
        limit: StartLimit | None = None,
        last_words: LastWords | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Ended:
        """Run a command, whose rank 0 tells ``said`` its words. An mpirun is ended once its ranks
        are gone; one of other hosts, also if it has no rank at its ``limit``. The ``last_words``
        are kept of its stderr, and ``variables`` are set in its environment."""
        self._is_starting = True
        ended = threading.Event()
        # In a session of its own, mostly: a terminal sends Ctrl-C to all processes of a group, but
        # only this one is to get it.
        with (
            OutputRelay(said, listens=not rank_0_here, last_words=last_words) as relay,
            subprocess.Popen(
                command,
                env={**os.environ, **variables, LAUNCHED: str(said.path), **self._terminal()},
                stdin=None if self._control.reads_stdin else subprocess.DEVNULL,
                stdout=relay.stdout,
                stderr=relay.stderr,
                start_new_session=not self._shares_terminal,
            ) as process,
        ):
            relay.started()
            running = _Running(process, relay, said, limit, rank_0_here, ended)
            self._running = running
            self._is_starting = False
            if self.stopped_by is not None and not running.signalled:  # while it started
                self._signal_next(running)
            if self._pauses_once_started:
                self._pause(signal.SIGTSTP, None)
            threading.Thread(target=running.end_alone, daemon=True).start()
            if limit is not None:
                threading.Thread(target=running.watch_start, args=(limit,), daemon=True).start()
            threading.Thread(target=running.wait, daemon=True).start()
            # A signal that comes just before a wait without a limit would be handled after it.
            while not ended.wait(1.0):
                pass
            status = process.wait()
        self._running = None
        signal.alarm(0)
        killed = status < 0
        return Ended(128 - status if killed else status, process.pid, running.too_late, killed)

    def _terminal(self) -> dict[str, str]:
        """Return the variable that gives this process's terminal to rank 0, if it needs it."""
        with contextlib.suppress(OSError):  # stdout is not a terminal, or closed
            return {TERMINAL: os.ttyname(1)} if self._control.streams else {}
        return {}

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._hung_up = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by = number
            if not self._control.in_order:
                self._steps = iter((number, signal.SIGTERM))
        elif number == signal.SIGHUP or self._hangs_up_now():
            return  # nobody is in a hurry
        if self._running is not None:
            self._signal_next(self._running)
        elif not self._is_starting:
            raise Stopped(self.stopped_by, "asked to stop")

    def _hangs_up_now(self) -> bool:
        """Return whether a signal is of one and the same end of a terminal."""
        return time.monotonic() - self._hung_up < SECONDS_OF_HANGING_UP

    def _signal_next(self, running: _Running) -> None:
        """Signal mpirun first, then say so."""
        running.signalled = True
        if running.ended.is_set():
            running.relay.abandon()
            return
        if running.hangs:
            threading.Thread(target=running.end, daemon=True).start()
            say_line("launch: no rank has begun yet: ending mpirun")
            return
        number = next(self._steps, signal.SIGKILL)
        if number is ASK_TO_STOP:
            if self.stopped_by is not None:
                note_stop(running.said.path, self.stopped_by)
            running.ask_to_stop()
            signal.alarm(math.ceil(self._control.seconds))
            say_line("launch: asked all ranks to save and stop; a second signal ends them at once")
            return
        running.process.send_signal(number)
        if number != signal.SIGKILL:
            say_line("launch: ending all ranks")

    def _pause(self, number: int, frame: types.FrameType | None) -> None:
        """Stop the ranks, and then this process, as Ctrl-Z does; go on together."""
        process = self._running.process if self._running is not None else None
        self._pauses_once_started = self._is_starting and process is None
        if self._pauses_once_started:
            return  # mpirun may run already, and is not known yet
        if process is not None:
            process.send_signal(signal.SIGTSTP)  # mpirun forwards it, and runs on
            say_line("launch: the ranks are stopped, too, until fg or bg")
        os.kill(os.getpid(), signal.SIGSTOP)
        if process is not None:
            process.send_signal(signal.SIGCONT)


def _has_child(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(process_state(c.pid) != "gone" for c in psutil.Process(pid).children())
    return False


def _is_read() -> bool:
    """Return whether this process's output accepts more: until then mpirun holds lines back."""
    with contextlib.suppress(OSError):  # one of them is closed
        return select.select([], [1, 2], [], 0)[1] == [1, 2]
    return True
