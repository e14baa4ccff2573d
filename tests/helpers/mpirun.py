"""Programs under the mpirun that belongs to this Python: each in a job of its own, or in a pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from testbed.jobs import Job, Running, patience
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool

SECONDS_OF_A_JOB = 240.0
"""Time after which a job hangs on any machine: pytest ends a test a little later, and does not know
where the ranks are."""


def mpirun(
    n: int,
    *args: str | Path,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    meanwhile: Callable[[int], None] = lambda pid: None,
    command: Sequence[str | Path] = (),
    longest: float = SECONDS_OF_A_JOB,
) -> Job:
    """Run ``python ARGS`` on ``n`` ranks of this machine.

    ``meanwhile`` is called with the process id of mpirun, once it is started. ``command`` is run
    in its place. A job that hangs, for ``longest`` on a busy machine, is killed, and fails the test
    with the place at which every rank was; so does a job that leaves a rank behind.
    """
    start = Running(command, env, cwd) if command else Running.ranks(n, *args, env=env, cwd=cwd)
    with start as running:
        meanwhile(running.process.pid)
        ended = running.wait(timeout) is not None
        more = min(patience(timeout), longest) - timeout
        if not ended and running.wait(max(0.0, more)) is None:
            job = running.where_it_hangs()
            pytest.fail(f"mpirun -n {n} {args} hung for {timeout:g} s\n{job.output}")
        orphans = running.left_behind()
        job = running.job()
    if orphans:
        pytest.fail(f"mpirun -n {n} {args} left processes behind: {orphans}\n{job.output}")
    return job


def train(n: int, *args: str | Path, timeout: float = 120.0, cwd: Path | None = None) -> Job:
    """Run ``python -m shardmlx.train ARGS`` on ``n`` ranks of the pool."""
    return run_in_pool(n, "-m", "shardmlx.train", *args, timeout=timeout, cwd=cwd)


def train_well(n: int, *args: str | Path, timeout: float = 120.0, cwd: Path | None = None) -> Job:
    return train(n, *args, timeout=timeout, cwd=cwd).well()


def run_checks(n: int, module: str, directory: Path, timeout: float = 120.0) -> dict[str, str]:
    """Run the ``checks`` of a module on ``n`` ranks: what went wrong in each, "" if nothing did.

    One job runs them all, since starting it takes longer than most of them.
    """
    job = run_in_pool(n, PROGRAMS / "run_checks.py", module, directory, timeout=timeout)
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
    """Return what mlx_lm.generate says, in a process without MPI."""
    program = PROGRAMS / "mlx_lm_generate.py"
    return run_in_pool(None, program, *args, "--verbose", "False").well().stdout
