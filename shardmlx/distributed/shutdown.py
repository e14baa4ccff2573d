"""How a job ends that cannot go on: one line, from one rank, and then every process.

The ranks tell each other when one of them has said what went wrong, so that the others, who only
wait for it, say nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from shardmlx.distributed.processes import find_mpirun
from shardmlx.errors import one_line

SECONDS_OF_A_TURN = 0.2
"""Between the ranks that see the same failure: the lowest speaks first, and the others hear it."""

SECONDS_TO_KILL = 0.7
"""More than mpirun takes to end all ranks after one of them has ended badly."""


class JobShutdown:
    """One rank's part in the end of a job. All methods may be called on any thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"rank {rank} on {socket.gethostname().split('.')[0]}"
        self.announce: Callable[[], None] = lambda: None
        """Tells the peers that this rank has spoken. The transport sets it once it can."""
        self.listen: Callable[[], None] = lambda: None
        """Lets this rank hear at once that a peer has spoken. The transport sets it too."""
        # Now: after mpirun's end this process is the child of whoever adopts it.
        self.launcher = find_mpirun()
        self._lock = threading.Lock()
        self._said = threading.Event()

    @property
    def said(self) -> bool:
        """Whether somebody has said what went wrong: this rank, or a peer."""
        return self._said.is_set()

    def hush(self) -> None:
        """A peer has said what went wrong."""
        self._said.set()

    def wait_to_hear(self, seconds: float) -> bool:
        """Whether somebody says what went wrong within ``seconds``."""
        return self._said.wait(seconds)

    def say(self, text: str, turn: float = 0.0) -> bool:
        """Print ``shardmlx: TEXT`` unless the job's end has been explained, also by a peer within
        ``turn`` seconds. Whether it did."""
        if turn:
            self.listen()
        if self.wait_to_hear(turn):
            return False
        with self._lock:
            if self._said.is_set():
                return False
            self._said.set()
            # One write: lines of several ranks and of mpirun must not mix.
            with contextlib.suppress(OSError):  # mpirun, which passes it on, may be gone
                sys.stderr.write(f"shardmlx: {text}\n")
                sys.stderr.flush()
        self.announce()
        return True

    def report(self, error: BaseException) -> bool:
        """``say`` what failed; of ranks that fail at once, as on a full disk, the lowest does."""
        if os.environ.get("SHARDMLX_TRACEBACK"):
            traceback.print_exception(error)
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)
        if not text.startswith(f"rank {self.rank}"):
            text = f"{self.name}: {type(error).__name__}: {text}"
        return self.say(f"failed: {text}", SECONDS_OF_A_TURN * min(self.rank, 8))

    def bounded(self, seconds: float, what: str) -> Deadline:
        """End this process, with a line, if the ``with`` block lasts longer: for calls that wait
        for all ranks and know no timeout. The call must release the GIL."""
        return Deadline(self, seconds, what)

    def launched(self) -> bool:
        """False once the mpirun of this process, or its daemon, has ended."""
        return self.launcher is None or self.launcher.runs()

    def see_off_launcher(self) -> None:
        """See to it that mpirun, or its daemon on this host, ends too."""
        if self.launcher is not None:
            self.launcher.see_off()


class Deadline:
    """Of one ``with`` block. Its thread starts here: it may be for the interpreter's exit, when
    Python starts none."""

    def __init__(self, ending: JobShutdown, seconds: float, what: str) -> None:
        self._ending = ending
        self._seconds = seconds
        self._what = what
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
        if self._left.wait(self._seconds):
            return
        # Only mpirun can tell the others, and ends them: the next rank waits for that.
        self._ending.wait_to_hear(SECONDS_TO_KILL * min(self._ending.rank, 8))
        with self._lock:
            if self._left.is_set():
                return  # late, but before its turn
            self._ending.say(
                f"failed: {self._ending.name}: {self._what}: not all ranks came within "
                f"{self._seconds:g} s (see --timeout)"
            )
            self._ending.see_off_launcher()
            os._exit(1)


def exit_within(seconds: float, code: int) -> None:
    """End this process, come what may, unless mpirun has done it before."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="ending", daemon=True).start()


def on_several_hosts() -> bool:
    """Whether mpirun has started ranks on other hosts too."""
    ranks, here = (os.environ.get(f"OMPI_COMM_WORLD_{what}SIZE") for what in ("", "LOCAL_"))
    return ranks != here
