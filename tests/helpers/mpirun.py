"""Runs Python programs under the mpirun that belongs to this Python, and lets none of them stay."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/mpi/programs"

SECONDS_TO_END = 10.0
"""Within which all ranks are gone once the job has ended, well or badly."""

_MARK = "SHARDMLX_TEST_JOB"


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
        """What shardmlx itself says that went wrong, without what mpirun adds."""
        # Open MPI ends what it says of an abort with a NUL, and its own frame of dashes may follow
        # a line of ours before that has ended.
        lines = self.output.replace("\0", "").splitlines()
        return [re.sub("-{20,}$", "", line) for line in lines if line.startswith("shardmlx: ")]


class Running:
    """Processes that were started together, and all that they start, wherever it hangs in the
    tree: none of them outlives the ``with`` block."""

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._files = [
            tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed at the exit
            for _ in range(2)
        ]
        # An mpirun that was killed leaves files there, on which a later one with the same process
        # number would fail to start. Not TMPDIR: in it MLX keeps kernels that it has compiled.
        self._temporary = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        environment = _environment(self._mark)
        environment["PRTE_MCA_prte_tmpdir_base"] = self._temporary.name
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=environment | dict(env or {}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )

    @classmethod
    def ranks(
        cls,
        n: int,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Running:
        """``python ARGS`` on ``n`` ranks of this machine."""
        mpirun = Path(sys.executable).with_name("mpirun")
        options = ("-n", str(n), "--oversubscribe", "--bind-to", "none")
        return cls([mpirun, *options, sys.executable, *args], env, cwd)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill(signal.SIGKILL)
        self.process.wait()
        for file in self._files:
            file.close()
        self._temporary.cleanup()

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if it has not ended within ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def pids(self) -> list[int]:
        """Of all that live."""
        return _marked(self._mark)

    def pid_of(self, rank: int) -> int | None:
        """Of a rank's process, once it is there. Linux only."""
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

    def left_behind(self) -> list[int]:
        """Who still lives ``SECONDS_TO_END`` after the end."""
        end = time.monotonic() + SECONDS_TO_END
        while (left := self.pids()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def job(self) -> Job:
        """What it has said so far."""
        for file in self._files:
            file.seek(0)
        stdout, stderr = (file.read() for file in self._files)
        return Job(self.process.poll() or 0, stdout, stderr)

    def where_it_hangs(self) -> Job:
        """Every Python says where it is, and dies."""
        self.kill(signal.SIGCONT)
        # mpirun must live to pass it on.
        self.kill(signal.SIGABRT, spare=self.process.pid)
        self.wait(SECONDS_TO_END)
        return self.job()


def mpirun(
    n: int,
    *args: str | Path,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    meanwhile: Callable[[int], None] = lambda pid: None,
    command: Sequence[str | Path] = (),
) -> Job:
    """Run ``python ARGS`` on ``n`` ranks of this machine.

    ``meanwhile`` is called with the process id of mpirun, once it is started. ``command`` is run
    in its place. A job that hangs is killed, and fails the test with the place at which every
    rank was; so does a job that leaves a rank behind.
    """
    start = Running(command, env, cwd) if command else Running.ranks(n, *args, env=env, cwd=cwd)
    with start as running:
        meanwhile(running.process.pid)
        if running.wait(timeout) is None:
            job = running.where_it_hangs()
            pytest.fail(f"mpirun -n {n} {args} hung for {timeout:g} s\n{job.output}")
        orphans = running.left_behind()
        job = running.job()
    if orphans:
        pytest.fail(f"mpirun -n {n} {args} left processes behind: {orphans}\n{job.output}")
    return job


def train(n: int, *args: str | Path, timeout: float = 120.0, cwd: Path | None = None) -> Job:
    """``mpirun -n N python -m shardmlx.train ARGS``."""
    return mpirun(n, "-m", "shardmlx.train", *args, timeout=timeout, cwd=cwd)


def train_well(n: int, *args: str | Path, timeout: float = 120.0, cwd: Path | None = None) -> Job:
    """As ``train``, for a run that must succeed."""
    job = train(n, *args, timeout=timeout, cwd=cwd)
    assert job.returncode == 0, job.output
    return job


def train_many(
    n: int, runs: Sequence[Sequence[str | Path]], file: Path, cwd: Path | None = None
) -> Job:
    """``shardmlx.train`` with each list of arguments, one after the other in one job on ``n``
    ranks, which must succeed. ``file`` is for the arguments."""
    file.write_text(json.dumps([[str(argument) for argument in run] for run in runs]))
    job = mpirun(n, PROGRAMS / "train_many.py", file, timeout=240.0, cwd=cwd)
    assert job.returncode == 0, job.output
    return job


def events(metrics: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a metrics file that tell of one kind of event."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [event for event in lines if event["event"] == name]


def _environment(mark: str) -> dict[str, str]:
    environment = dict(os.environ)
    # Where faulthandler writes, at SIGABRT, what every thread was doing.
    environment["PYTHONFAULTHANDLER"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment[_MARK] = mark
    if os.geteuid() == 0:
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def _marked(mark: str) -> list[int]:
    """The processes of a job, wherever they hang in the tree: they inherit its environment."""
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


def run_checks(n: int, module: str, directory: Path, timeout: float = 120.0) -> dict[str, str]:
    """Run the ``checks`` of a module on ``n`` ranks: what went wrong in each, "" if nothing did.

    One mpirun runs them all, since starting it takes longer than most of them.
    """
    job = mpirun(n, PROGRAMS / "run_checks.py", module, directory, timeout=timeout)
    errors: dict[str, str] = {}
    finished: dict[str, int] = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            name, error = json.loads(line)
            finished[name] = finished.get(name, 0) + 1
            errors[name] = errors.get(name, "") + (f"{path.stem}:\n{error}" if error else "")
    for name, count in finished.items():
        if count < n and not errors[name]:
            errors[name] = f"{n - count} of {n} ranks did not finish\n{job.output}"
    if not errors:
        pytest.fail(f"mpirun ran no check\n{job.output}")
    return errors


def verdict(errors: Mapping[str, str], name: str) -> None:
    """Fail the test if check ``name`` failed, or was never reached."""
    error = errors.get(name, "not reached: an earlier check failed")
    if error:
        pytest.fail(error, pytrace=False)


def mlx_lm(*args: str | Path) -> str:
    """What mlx_lm.generate says, in one process."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / "mlx_lm_generate.py", *args, "--verbose", "False"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
