"""Processes that a test or a script starts together, and that never outlive it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STARTUP = ROOT / "testbed/startup"
PYTHONPATH = os.pathsep.join([str(ROOT), str(STARTUP)])
"""With which a Python finds shardmlx, wherever it runs, and starts sooner."""

CACHE = ROOT / ".cache"
"""Holds what later runs of the tests may find as it is."""

SECONDS_TO_END = 10.0
"""Time within which all ranks are gone once the job has ended, well or badly."""

AFTER_A_KILL = {128 + signal.SIGKILL, 1}
"""Statuses of mpirun: the killed rank's, or that of the rank which reported it, whichever it saw
first."""

_MARK = "SHARDMLX_TEST_JOB"


def patience(seconds: float) -> float:
    """Return the seconds after which a job hangs on a machine as busy as this one is now, if it
    does so after ``seconds`` on a quiet one."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass(frozen=True)
class Job:
    """An mpirun that has ended, and all its ranks with it."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def error_lines(self) -> list[str]:
        """Lines in which shardmlx says what went wrong, without what mpirun adds."""
        # Open MPI ends what it says of an abort with a NUL, and its own frame of dashes may follow
        # a line of ours before that has ended.
        lines = self.output.replace("\0", "").splitlines()
        return [re.sub("-{20,}$", "", line) for line in lines if line.startswith("shardmlx: ")]

    @property
    def answer(self) -> str:
        """The text that ``shardmlx generate`` has shown, with its line ends."""
        return self.well().stdout.split("==========")[1]

    @property
    def status(self) -> int:
        """The job's exit status; that which mpirun told, where mpirun itself crashed after it: Open
        MPI 5.0.11's may, if a rank connects to it while the job ends."""
        told = re.search(r"^prterun detected .*^ *Exit code: +(\d+)$", self.stderr, re.M | re.S)
        crashed = self.returncode == -signal.SIGABRT and "\nprterun: " in self.stderr
        return int(told[1]) if crashed and told is not None else self.returncode

    def well(self) -> Job:
        """Return the job, which must have ended well."""
        assert self.returncode == 0, self.output
        return self

    def failure(self, *statuses: int) -> str:
        """Return the one line in which the job says what went wrong; it must have ended with one of
        these statuses."""
        assert self.status in statuses, self.output
        assert "Traceback" not in self.output
        assert len(self.error_lines) == 1, self.output
        return self.error_lines[0]


def ranks_command(n: int, *args: str | Path, bind: str = "none") -> list[str]:
    """Return the command that runs ``python ARGS`` on ``n`` ranks of this machine, each bound to
    nothing, or to a ``core``."""
    options = ("-n", str(n), "--oversubscribe", "--bind-to", bind)
    mpirun = Path(sys.executable).with_name("mpirun")
    return [str(mpirun), *options, sys.executable, *map(str, args)]


class Running:
    """Processes that were started together, and all that they start, wherever it hangs in the
    tree: none of them outlives the ``with`` block."""

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        terminal: int | None = None,
    ) -> None:
        """``terminal`` becomes the controlling one, and takes stdin, stdout and stderr."""
        self._mark = uuid.uuid4().hex
        self._killed: set[int] = set()
        self._files = [
            tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed at the exit
            for _ in range(2)
        ]
        for file in self._files:
            # They write at the end, wherever a reader of the same file is.
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        # An mpirun that was killed leaves files there, on which a later one with the same process
        # number would fail to start. Not TMPDIR: in it MLX keeps kernels that it has compiled.
        self._temporary = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        environment = _environment(self._mark)
        environment["PRTE_MCA_prte_tmpdir_base"] = self._temporary.name
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=environment | dict(env or {}),
            cwd=cwd,
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=self._files[0] if terminal is None else terminal,
            stderr=self._files[1] if terminal is None else terminal,
            start_new_session=True,
            preexec_fn=None if terminal is None else _take_terminal,
        )

    @classmethod
    def ranks(
        cls,
        n: int,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Running:
        return cls(ranks_command(n, *args), env, cwd)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        end = time.monotonic() + patience(SECONDS_TO_END)
        self.kill(signal.SIGKILL)
        self.process.wait()
        # What a process had locked or listened to is free a little after it was killed.
        while any(map(_lives, self._killed)) and time.monotonic() < end:
            self.kill(signal.SIGKILL)  # also what one of them has just started
            time.sleep(0.01)
        for file in self._files:
            file.close()
        self._temporary.cleanup()

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None if it has not ended within ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def pids(self) -> list[int]:
        """Return the process ids of all that live."""
        return _marked(self._mark)

    def pid_of(self, rank: int) -> int | None:
        """Return the process id of a rank, once it is there. Linux only."""
        wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        return None

    def kill(self, number: signal.Signals, spare: int | None = None) -> None:
        """Send a signal to all, but for the process ``spare``."""
        for pid in self.pids():
            if pid != spare:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    if number == signal.SIGKILL:
                        self._killed.add(pid)

    def kill_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank that is there. Linux only."""
        pid = self.pid_of(rank)
        assert pid is not None, f"rank {rank} is not there\n{self.job().output}"
        os.kill(pid, number)

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for what the processes do; if they do not, say where they are."""
        end = time.monotonic() + patience(seconds)
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"it does not happen\n{self.where_it_hangs().output}")
            time.sleep(0.05)

    def left_behind(self) -> list[int]:
        """Return the process ids of those that live ``SECONDS_TO_END`` after the end."""
        end = time.monotonic() + patience(SECONDS_TO_END)
        while (left := self.pids()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def job(self) -> Job:
        for file in self._files:
            file.seek(0)
        stdout, stderr = (file.read() for file in self._files)
        return Job(self.process.poll() or 0, stdout, stderr)

    def where_it_hangs(self) -> Job:
        self.kill(signal.SIGCONT)
        # mpirun must live to pass it on.
        self.kill(signal.SIGABRT, spare=self.process.pid)
        self.wait(SECONDS_TO_END)
        return self.job()


def _take_terminal() -> None:
    """Make stdin the controlling terminal of this session. Called in the new process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _environment(mark: str) -> dict[str, str]:
    environment = dict(os.environ)
    # Where faulthandler writes, at SIGABRT, what every thread was doing.
    environment["PYTHONFAULTHANDLER"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(
        [PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment[_MARK] = mark
    if os.geteuid() == 0:
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def _lives(pid: int) -> bool:
    """Tell whether a process still holds what it had opened: until its last thread has ended, which
    may be after its first. Linux only."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
                return True
    return False


def _marked(mark: str) -> list[int]:
    """Return the processes of a job, wherever they hang in the tree: they inherit its mark."""
    if not Path("/proc/self/environ").exists():
        listing = subprocess.run(
            ["ps", "-axEww", "-o", "pid=,command="], capture_output=True, text=True, check=True
        )
        return [int(line.split()[0]) for line in listing.stdout.splitlines() if mark in line]
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                environment = (directory / "environ").read_bytes()
            except OSError:
                continue  # it has ended, or is another user's
            if mark.encode() in environment:
                found.append(int(directory.name))
    return found
