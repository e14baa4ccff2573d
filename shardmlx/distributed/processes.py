"""Processes of this machine: whether one lives, and which of them is the mpirun of this job."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


def process_state(pid: int) -> str | None:
    """Of a process on this machine: ``gone``, ``stopped`` (known on Linux only), or None."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return None
    try:
        # The name in brackets may hold anything, also brackets.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The mpirun of this job, or its daemon on this host. ``started`` tells it from a later
    process with the same number; ``direct`` is whether this process is its child."""

    pid: int
    name: str
    started: str
    direct: bool

    @property
    def is_mpirun(self) -> bool:
        """Rather than a daemon: whether signals to it go to all ranks."""
        return self.name != _DAEMON

    def runs(self) -> bool:
        """Whether it is still there. Asked all the time."""
        return os.getppid() == self.pid if self.direct else process_state(self.pid) != "gone"

    def see_off(self) -> None:
        """Leave a process behind for some seconds that ends it, if it does not end by itself.

        It may wait for ever, having killed the ranks: for a host that does not answer, or for a
        rank that died while it came to them.
        """
        process = _look(self.pid)
        if process is None or (process.name, process.started) != (self.name, self.started):
            return
        with contextlib.suppress(OSError):
            subprocess.Popen(
                ["sh", "-c", _SEE_OFF, "sh", str(self.pid), self.started],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # mpirun kills what is in the rank's process group
            )


_SEE_OFF = """
started() {
    if [ -r "/proc/$1/stat" ]
    then read -r line < "/proc/$1/stat"; set -- ${line##*)}; echo "${20}"
    else echo $(LC_ALL=C ps -o lstart= -p "$1")
    fi
}
gone() { [ "$(started "$1")" != "$2" ]; }
for i in 1 2 3 4 5 6 7 8; do gone "$@" && exit; sleep 0.5; done
for signal in TERM TERM TERM KILL; do kill -"$signal" "$1"; sleep 0.2; gone "$@" && exit; done
"""
"""mpirun leaves at once after the third signal; its daemons do not."""

_DAEMON = "prted"

_MPIRUN = ("prterun", "mpirun", "mpiexec")


def under_mpirun() -> bool:
    """Whether this process is a rank of a job, of whatever launcher."""
    return "PMIX_NAMESPACE" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def find_launcher() -> Launcher | None:
    """The mpirun that started this process, itself or through a script; None without one, where
    it cannot be seen from here, or where it is there for other jobs too."""
    # Open MPI names a job of its own mpirun prterun-HOST-PID@NUMBER.
    namespace = os.environ.get("PMIX_NAMESPACE", "")
    if not namespace.startswith("prterun-"):
        return None
    number = namespace.rpartition("@")[0].rpartition("-")[2]
    parent = pid = os.getppid()
    while pid > 0 and (process := _look(pid)) is not None:
        if process.name == _DAEMON or (process.name in _MPIRUN and str(pid) == number):
            return Launcher(pid, process.name, process.started, direct=pid == parent)
        pid = process.parent
    return None


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    name: str
    started: str


def _look(pid: int) -> _Process | None:
    return _look_in_proc(pid) if Path("/proc/self/stat").exists() else _look_with_ps(pid)


def _look_in_proc(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()  # proc(5), from the third on
    return _Process(int(fields[1]), name, fields[19])


def _look_with_ps(pid: int) -> _Process | None:
    try:
        done = subprocess.run(
            ["ps", "-o", "ppid=,lstart=,comm=", "-p", str(pid)],
            env=os.environ | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    match done.stdout.split(maxsplit=6):
        case [parent, *started, name]:  # such as Fri Nov 21 10:33:07 2025
            return _Process(int(parent), Path(name.rstrip()).name, " ".join(started))
    return None
