"""How a job ends that cannot go on: one line, from one rank, and then every process.

The ranks tell each other when one of them has said what went wrong, so that the others, who only
wait for it, say nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardmlx.errors import one_line

SECONDS_OF_A_TURN = 0.2
"""Between the ranks that see the same failure: the lowest speaks first, and the others hear it."""

SECONDS_TO_KILL = 0.7
"""More than mpirun takes to end all ranks after one of them has ended badly."""


class Ending:
    """One rank's part in the end of a job. All methods may be called on any thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"rank {rank} on {socket.gethostname().split('.')[0]}"
        self.announce: Callable[[], None] = lambda: None
        """Tells the peers that this rank has spoken. The transport sets it once it can."""
        self._lock = threading.Lock()
        self._said = threading.Event()

    @property
    def said(self) -> bool:
        """Whether somebody has said what went wrong: this rank, or a peer."""
        return self._said.is_set()

    def hush(self) -> None:
        """A peer has said what went wrong."""
        self._said.set()

    def say(self, text: str, turn: float = 0.0) -> bool:
        """Print ``shardmlx: TEXT`` unless the job's end has been explained, also by a peer within
        ``turn`` seconds. Whether it did."""
        if self._said.wait(turn):
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

    @contextmanager
    def bounded(self, seconds: float, what: str) -> Iterator[None]:
        """End this process, with a line, if the block lasts longer: for calls that wait for all
        ranks and know no timeout. The call must release the GIL."""

        def expire() -> None:
            # Only mpirun can tell the others, and ends them: the next rank waits for that.
            self.say(
                f"failed: {self.name}: {what}: not all ranks came within {seconds:g} s "
                "(see --timeout)",
                SECONDS_TO_KILL * min(self.rank, 8),
            )
            see_off_launcher()
            os._exit(1)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


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


def see_off_launcher() -> None:
    """Leave a process behind for some seconds that ends this host's mpirun, or its daemon.

    They may wait for ever, having killed the ranks: for a host that does not answer, or for a rank
    that died while it came to them. Nothing is done where the launcher is there for other jobs too.
    """
    if not os.environ.get("PMIX_NAMESPACE", "").startswith("prterun-"):
        return
    with contextlib.suppress(OSError):
        subprocess.Popen(
            ["sh", "-c", _SEE_OFF, "sh", str(os.getppid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # mpirun kills what is in the rank's process group
        )


_SEE_OFF = """
gone() { [ "$1" -le 1 ] || ! kill -0 "$1"; }
for i in 1 2 3 4 5 6 7 8; do gone "$1" && exit; sleep 0.5; done
for signal in TERM TERM TERM KILL; do kill -"$signal" "$1"; sleep 0.2; gone "$1" && exit; done
"""
"""mpirun leaves at once after the third signal; its daemons do not."""
