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

SECONDS_TO_FOLLOW = 4.0
"""Seconds for mpirun to end after a rank that has ended the job."""

SIGNALS_THAT_END = (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
"""mpirun leaves at once after the third SIGTERM; its daemons do not."""

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
    """Return the path of what a process of this machine has open as ``fd``; None where that cannot
    be seen. What has no path is called as the system does, like ``pipe:[4711]``."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            return os.readlink(f"/proc/{pid}/fd/{fd}")
        listing = subprocess.run(
            ["lsof", "-a", "-p", str(pid), "-d", str(fd), "-Fn"],
            capture_output=True,
            text=True,
            check=False,
        )
        # A line for each field, whose first letter says which it is.
        return next((line[1:] for line in listing.stdout.splitlines() if line[:1] == "n"), None)
    return None


@dataclass(frozen=True, slots=True)
class MpirunProcess:
    """The mpirun of this job, or its daemon on this host. ``direct`` is whether this process is its
    child."""

    process: psutil.Process
    name: str
    direct: bool

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.process.pid

    @property
    def is_mpirun(self) -> bool:
        """True if it is mpirun itself, and no daemon: signals to it go to all ranks."""
        return self.name != _DAEMON

    def runs(self) -> bool:
        """Return whether it is still there. Asked all the time."""
        return os.getppid() == self.pid if self.direct else process_state(self.pid) != "gone"

    def see_off(self, seconds: float = SECONDS_TO_FOLLOW) -> None:
        """Leave a process behind that ends it, if it does not end by itself within ``seconds``.

        It may wait for ever, having killed the ranks: for a host that does not answer, or for a
        rank that died while it came to them.
        """
        if not self.process.is_running():  # nor is a later process with the same number
            return
        with contextlib.suppress(OSError, psutil.Error):
            started = psutil.Process(self.pid).create_time()
            subprocess.Popen(
                [sys.executable, "-P", __file__, *map(str, (self.pid, started, seconds))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # mpirun kills what is in the rank's process group
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
    """Return whether this process is a rank of a job, of whatever launcher."""
    return "PMIX_NAMESPACE" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def find_mpirun() -> MpirunProcess | None:
    """Return the mpirun that started this process, itself or through a script.

    None without one, where it cannot be seen from here, or where it is there for other jobs too.
    """
    # Open MPI names a job of its own mpirun prterun-HOST-PID@NUMBER.
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
                return MpirunProcess(process, name, direct=process.pid == parent)
    return None


if __name__ == "__main__":
    end_process(int(sys.argv[1]), *map(float, sys.argv[2:]))
