"""The end of a job that cannot go on: one line, from one rank, and then every process.

While messages work, the ``JobWatch`` of a rank tells the others that it has reported the failure.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from shardmlx.common.environment import LAUNCHED
from shardmlx.common.hang_up import say_line
from shardmlx.distributed.processes import MpirunProcess, find_mpirun, under_mpirun
from shardmlx.distributed.times import (
    HURRY,
    MOST_TURNS,
    SECONDS_FOR_LOWER_RANKS,
    SECONDS_FOR_PEERS,
    SECONDS_FOR_RANK_0,
    SECONDS_TO_BE_HEARD,
    SECONDS_TO_COME,
    SECONDS_TO_FOLLOW,
    SECONDS_TO_KILL,
    turn,
)
from shardmlx.errors import UserError, explained, one_line


class JobShutdown:
    """Control over the end of a job, for one rank. All methods may be called on any thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"rank {rank} on {socket.gethostname().split('.')[0]}"
        self.reported = threading.Event()
        """Set once this rank or a peer has reported the failure."""
        self._saying = threading.Lock()
        self.on_turn: Callable[[], None] = lambda: None
        """Function called when this rank begins to wait for its turn to report."""
        self.on_reported: Callable[[], None] = lambda: None
        """Function called once this rank has reported the failure."""
        self.leaves_report: Callable[[], bool] = lambda: False
        """Function that returns whether a lower rank is about to report the end of the job."""
        self.ranks_to_outlive: tuple[int, ...] = ()
        """Processes that ``leave_last`` waits for."""
        # Now: after mpirun's end this process has another parent.
        self.mpirun: MpirunProcess | None = find_mpirun()

    def say(self, text: str, seconds: float = 0.0) -> bool:
        """Print ``shardmlx: TEXT`` unless the end of the job has been reported.

        A peer may report it within ``seconds``, or a little later if one is about to. Returns
        whether this rank did; the peers then stay silent.
        """
        if seconds:
            self.on_turn()
            self.reported.wait(seconds)
            end = time.monotonic() + SECONDS_FOR_LOWER_RANKS
            while self.leaves_report() and time.monotonic() < end:
                if self.reported.wait(HURRY):
                    break
        with self._saying:
            if self.reported.is_set():
                return False
            self.reported.set()
            # One write, so that lines of several ranks and of mpirun do not mix.
            with contextlib.suppress(OSError):  # mpirun, which relays it, may be gone
                sys.stderr.write(f"shardmlx: {text}\n")
                sys.stderr.flush()
        self.on_reported()
        return True

    def report(self, error: BaseException, at_once: bool = False) -> bool:
        """Report a failure; if several ranks fail at once, only the lowest reports.

        ``at_once`` if the lower ranks have had their turns.
        """
        if os.environ.get("SHARDMLX_TRACEBACK"):
            traceback.print_exception(error)
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else explained(one_line(error))
        if not text.startswith(f"rank {self.rank}"):
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            text = f"{self.name}: {kind}{text}"
        # Rank 0 listens too: another may have reported a moment ago.
        seconds = 0.0 if at_once else SECONDS_TO_BE_HEARD + turn(self.rank)
        return self.say(f"failed: {text}", seconds)

    def launched(self) -> bool:
        """Return False once the mpirun of this process, or its daemon, has ended."""
        return self.mpirun is None or self.mpirun.runs()

    def ensure_mpirun_ends(self, seconds: float = SECONDS_TO_FOLLOW) -> None:
        """Make sure that mpirun, or its daemon on this host, ends too, within ``seconds``."""
        if self.mpirun is not None:
            self.mpirun.ensure_end(seconds)

    def leave_last(self) -> None:
        """Let the other ranks of this host go before rank 0, which alone has the job's status.

        After a bad status mpirun kills the remaining ranks; if some end at the same moment, it may
        lose count of them and wait for ever.
        """
        end = time.monotonic() + SECONDS_FOR_PEERS
        while any(map(psutil.pid_exists, self.ranks_to_outlive)) and time.monotonic() < end:
            time.sleep(HURRY)

    def stop_command(self) -> str | None:
        """Return the shell command for this host that stops the run in order, if it is known."""
        if LAUNCHED in os.environ:
            return None
        if self.mpirun is not None and self.mpirun.is_mpirun:
            # Not by mpirun: Ctrl-C and SIGTERM leave its ranks no time for a checkpoint, and it
            # forwards a number that differs between Linux and macOS.
            return f"kill -USR1 {os.getpid()}"
        return None if under_mpirun() else f"kill -TERM {os.getpid()}"


@dataclass(frozen=True, slots=True)
class Absent:
    """The ranks, in words, that have not come to where all wait, and the likely causes."""

    who: str = "not all ranks came"
    why: str = ""


_CAUSES = (
    "see the firewalls (shardmlx doctor --ssh connects as ranks do), whether openmpi has one "
    "version on all hosts, and which networks they share (btl_tcp_if_include)"
)


def absent_at_start(names: Sequence[str] = ()) -> Absent:
    """Return who has not come to the start of MPI: ranks by name, if they are known. The causes are
    those of reports about Open MPI between hosts."""
    if not names:
        return Absent(why=_CAUSES)
    return Absent(f"no message of MPI from {' and '.join(names)} came", _CAUSES)


def absent_before_start(names: Sequence[str]) -> Absent:
    """Return which ranks, by name, have not yet called MPI; if all have, that MPI keeps them."""
    if not names:
        return Absent("all ranks came, and Open MPI did not connect them", _CAUSES)
    return Absent(
        f"{' and '.join(names)} did not come",
        f"see what its Python does there, which has to load first; or {_CAUSES}",
    )


class Deadline:
    """Time limit of one ``with`` block: beyond it this process ends, with a line.

    Meant for calls that wait for all ranks, have no timeout, and release the GIL. The thread starts
    here, because Python starts none at the interpreter's exit. The line ends with what ``absent``
    returns: who has not come, and why that may be. If it is given, rank 0 says so sooner, too.
    """

    def __init__(
        self,
        shutdown: JobShutdown,
        seconds: float,
        what: str,
        absent: Callable[[], Absent] | None = None,
    ) -> None:
        self._shutdown = shutdown
        self._seconds = seconds
        self._what = what
        self._absent = absent
        self._entered = threading.Event()
        self._left = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def __enter__(self) -> None:
        self._entered.set()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._left.set()

    def _watch(self) -> None:
        self._entered.wait()
        shutdown = self._shutdown
        until = min(SECONDS_TO_COME, self._seconds / 2)
        if self._left.wait(until):
            return
        if self._absent is not None and shutdown.rank == 0 and on_several_hosts():
            absent = self._absent()
            said = f"{self._what}: {absent.who} within {until:g} s; the job ends after "
            say_line(f"warning: {said}{self._seconds:g} s (--timeout): {absent.why}")
        if self._left.wait(self._seconds - until):
            return
        if shutdown.rank > 0:
            # Only mpirun can tell and end the others, so the next rank waits for that. Rank 0 may
            # have begun to wait later.
            turns = min(shutdown.rank - 1, MOST_TURNS)
            shutdown.reported.wait(SECONDS_FOR_RANK_0 + SECONDS_TO_KILL * turns)
        with self._lock:
            if self._left.is_set():
                return  # late, but before its turn
            absent = Absent() if self._absent is None else self._absent()
            why = f": {absent.why}" if absent.why and on_several_hosts() else ""
            shutdown.say(
                f"failed: {shutdown.name}: {self._what}: {absent.who} within "
                f"{self._seconds:g} s (see --timeout){why}"
            )
            shutdown.ensure_mpirun_ends()
            os._exit(1)


def on_several_hosts() -> bool:
    """Return whether mpirun has started ranks on other hosts too."""
    ranks, here = (os.environ.get(f"OMPI_COMM_WORLD_{what}SIZE") for what in ("", "LOCAL_"))
    return ranks != here
