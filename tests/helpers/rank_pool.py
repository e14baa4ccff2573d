"""Ranks that stay between the tests: a job takes ten times as long to start as a tiny run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.jobs import Job, Running, patience
from tests.helpers.programs import PROGRAMS


class RankPool:
    """An mpirun whose ranks run one Python program after the other, until it is closed.

    Without ``ranks`` one Python, which mpirun has not started.
    """

    def __init__(self, ranks: int | None) -> None:
        self._size = ranks or 1
        self._directory = tempfile.TemporaryDirectory(prefix="pool-", ignore_cleanup_errors=True)
        self._path = Path(self._directory.name)
        arguments = PROGRAMS / "pool.py", self._path, str(os.getpid())
        if ranks:
            self._running = Running.ranks(ranks, *arguments)
        else:
            self._running = Running([sys.executable, *arguments])
        self._count = 0

    @property
    def ended(self) -> bool:
        return self._running.process.poll() is not None

    def run(self, arguments: Sequence[str | Path], cwd: Path, timeout: float) -> Job:
        """Run ``python ARGUMENTS`` on all ranks, which must come to the same exit status; of our
        commands rank 0 alone has one.

        A program that ends the job ends the pool. One that hangs does too, and fails the test with
        the place at which every rank was.
        """
        number, self._count = self._count, self._count + 1
        request = self._path / f"{number}.new"
        request.write_text(json.dumps([list(map(str, arguments)), str(cwd)]))
        request.rename(request.with_suffix(".json"))
        results = [self._path / f"{number}-{rank}.status" for rank in range(self._size)]
        start = time.monotonic()
        while not (self.ended or all(map(Path.exists, results))):
            if time.monotonic() - start > patience(timeout):
                break
            time.sleep(0.01)
        if self.ended:
            job = self._running.job()
            return Job(job.returncode, self._said(number, ".out") + job.stdout,
                       self._said(number, ".err") + job.stderr)  # fmt: skip
        if not all(map(Path.exists, results)):
            job = self._running.where_it_hangs()
            said = self._said(number, ".out") + self._said(number, ".err")
            pytest.fail(f"{arguments} hung for {timeout:g} s\n{said}{job.output}")
        statuses = [int(result.read_text()) for result in results]
        job = Job(statuses[0], self._said(number, ".out"), self._said(number, ".err"))
        of_others = {0} if arguments[0] == "-m" else {0, statuses[0]}
        if not of_others.issuperset(statuses[1:]):
            pytest.fail(f"{arguments}: the ranks ended with {statuses}\n{job.output}")
        return job

    def ask_to_end(self) -> None:
        (self._path / "end").touch()

    def close(self) -> None:
        self.ask_to_end()
        with self._running:
            self._running.wait(patience(60.0))
            orphans = self._running.left_behind()
        self._directory.cleanup()
        assert not orphans, f"ranks stayed behind: {orphans}"

    def _said(self, number: int, suffix: str) -> str:
        files = [self._path / f"{number}-{rank}{suffix}" for rank in range(self._size)]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())


_pools: dict[int | None, RankPool] = {}


def run_in_pool(
    ranks: int | None, *args: str | Path, timeout: float = 120.0, cwd: Path | None = None
) -> Job:
    """Run ``python ARGS`` as ``mpirun`` does, on ranks that have run other programs before.

    For what ends in order, and leaves its process as it was. A rank that refuses its options before
    MPI starts waits in vain for the end that mpirun would bring: use ``mpirun``.
    """
    pool = _pools.get(ranks)
    if pool is not None and pool.ended:
        _pools.pop(ranks).close()
        pool = None
    if pool is None:
        pool = _pools[ranks] = RankPool(ranks)
    return pool.run(args, cwd or Path.cwd(), timeout)


def close_pools() -> None:
    for pool in _pools.values():
        pool.ask_to_end()
    while _pools:
        _pools.popitem()[1].close()
