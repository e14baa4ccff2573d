"""Processes of this machine: whether one lives, and which of them is the mpirun of this job.

Run as a program with the arguments of ``end_process``, it ends that process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import psutil

_STATES = {
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
}

_DAEMON = "prted"

_MPIRUN = ("prterun", "mpirun", "mpiexec")

SIGNALS_THAT_END = (*(signal.SIGTERM,) * 8, signal.SIGKILL)
"""Signals to send in order: mpirun ends at the third SIGTERM that it sees, and two that come while
it has no core are one. Its daemons do not end at any."""

SECONDS_BETWEEN_SIGNALS = 0.2


def process_state(pid: int) -> str | None:
    """Return the state of a process of this machine: ``gone``, ``stopped``, or None."""
    try:
        return _STATES.get(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return None


def open_file(pid: int, fd: int) -> str | None:
    """Return the path that a process of this machine has open as ``fd``; None if it cannot be seen.
    A file without a path is named as the system does, like ``pipe:[4711]``."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            return os.readlink(f"/proc/{pid}/fd/{fd}")
        listing = subprocess.run(
            ["lsof", "-a", "-p", str(pid), "-d", str(fd), "-Fn"],
            capture_output=True,
            text=True,
            check=False,
        )
        # Each line has a field, named by its first letter.
        return next((line[1:] for line in listing.stdout.splitlines() if line[:1] == "n"), None)
    return None


@dataclass(frozen=True, slots=True)
class MpirunProcess:
    """The mpirun of this job, to which signals go on to all ranks, or else its daemon on this host.
    A ``direct`` one is this process's parent."""

    process: psutil.Process
    is_mpirun: bool
    direct: bool

    def runs(self) -> bool:
        """Return whether it still runs. Called very often."""
        pid = self.process.pid
        return os.getppid() == pid if self.direct else process_state(pid) != "gone"

    def ensure_end(self, seconds: float) -> None:
        """Start a process that ends it, unless it ends by itself within ``seconds``.

        After killing the ranks it may wait for ever: for a host that does not answer, or for a rank
        that died meanwhile.
        """
        if not self.process.is_running():  # false for a later process with the same number, too
            return
        with contextlib.suppress(OSError, psutil.Error):
            pid = self.process.pid
            started = psutil.Process(pid).create_time()
            subprocess.Popen(
                [sys.executable, "-P", __file__, *map(str, (pid, started, seconds))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # mpirun kills the rank's process group
            )


def end_process(pid: int, started: float, patience: float) -> None:
    """Wait ``patience`` seconds for the end of a process that began at ``started``; then end it.

    ``started`` is in seconds since 1970, and tells the process from a later one with its number.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - started) > 1:
            return
        steps = [(number, SECONDS_BETWEEN_SIGNALS) for number in SIGNALS_THAT_END]
        for number, seconds in [(0, patience), *steps]:
            with contextlib.suppress(psutil.TimeoutExpired):
                process.send_signal(number)
                process.wait(seconds)
                return


def under_mpirun() -> bool:
    """Return whether this process is a rank of a job, of any launcher."""
    return "PMIX_NAMESPACE" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def find_mpirun() -> MpirunProcess | None:
    """Return the mpirun that started this process, itself or through a script.

    None without mpirun, if it cannot be seen from here, or if it serves other jobs too.
    """
    # Open MPI names a job of a separate mpirun prterun-HOST-PID@NUMBER.
    namespace = os.environ.get("PMIX_NAMESPACE", "")
    if not namespace.startswith("prterun-"):
        return None
    number = namespace.rpartition("@")[0].rpartition("-")[2]
    parent = os.getppid()
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(parent)
        for process in (first, *first.parents()):
            name = process.name()
            if name == _DAEMON or (name in _MPIRUN and str(process.pid) == number):
                return MpirunProcess(process, name != _DAEMON, direct=process.pid == parent)
    return None


if __name__ == "__main__":
    end_process(int(sys.argv[1]), *map(float, sys.argv[2:]))
