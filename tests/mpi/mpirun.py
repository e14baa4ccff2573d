"""Runs Python programs under the mpirun that belongs to this Python, and lets none of them stay."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"

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


def mpirun(
    n: int,
    *args: str | Path,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> Job:
    """Run ``python ARGS`` on ``n`` ranks of this machine.

    A job that hangs is killed, and fails the test with the place at which every rank was; so
    does a job that leaves a rank behind.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("mpirun")),
            *("-n", str(n), "--oversubscribe", "--bind-to", "none"),
            sys.executable,
            *map(str, args),
        ],
        env=_environment(mark) | (env or {}),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Python then says where it was; mpirun must live to pass it on.
        _kill(mark, signal.SIGABRT, spare=process.pid)
        try:
            stdout, stderr = process.communicate(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            _kill(mark, signal.SIGKILL)
            stdout, stderr = process.communicate()
        pytest.fail(f"mpirun -n {n} {args} hung for {timeout:g} s\n{stdout}\n{stderr}")
    finally:
        orphans = _wait_until_gone(mark)
        _kill(mark, signal.SIGKILL)
    if orphans:
        pytest.fail(f"mpirun -n {n} {args} left processes behind: {orphans}\n{stdout}\n{stderr}")
    return Job(process.returncode, stdout, stderr)


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


def _wait_until_gone(mark: str) -> list[int]:
    end = time.monotonic() + SECONDS_TO_END
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _kill(mark: str, number: signal.Signals, spare: int | None = None) -> None:
    for pid in _marked(mark):
        if pid != spare:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


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
