"""A link between two hosts is cut, or a rank dies on the other host: both sides end, and one says
what was lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.hosts import Lab, hosts
from testbed.jobs import AFTER_A_KILL, Job, patience
from tests.helpers.mpirun import mpirun
from tests.helpers.programs import PROGRAMS


def run_until(
    lab: Lab,
    event: Callable[[dict[int, int]], None],
    phase: str = "training",
    timeout: float = 60.0,
) -> tuple[Job, float]:
    """A rank on each host; ``event`` is given their process ids. The job, and how long it lasted
    after that. ``mpirun`` fails the test if anything is left on any host."""
    happened = 0.0

    def meanwhile(pid: int) -> None:
        nonlocal happened
        end = time.monotonic() + patience(60.0)
        files = [lab.home(host) / str(rank) for rank, host in enumerate(lab.hosts)]
        while not all(file.exists() for file in files) and time.monotonic() < end:
            time.sleep(0.05)
        event({rank: int(file.read_text()) for rank, file in enumerate(files)})
        happened = time.monotonic()

    count = len(lab.hosts)
    command = lab.mpirun(count, PROGRAMS / "until_stopped.py", phase, ".", str(timeout))
    job = mpirun(count, command=command, meanwhile=meanwhile, timeout=80.0)
    return job, time.monotonic() - happened


@pytest.mark.parametrize("phase", ["training", "summing"])
def test_a_cut_link_ends_both_sides(phase: str, lab: Lab) -> None:
    """After 3 s without a sign of life; mpirun and its daemon, which cannot reach each other,
    soon after."""
    timeout = patience(3.0)
    job, seconds = run_until(lab, lambda ranks: lab.cut(), phase, timeout)
    assert seconds < timeout + patience(10.0)
    line = job.failure(1)
    assert line.startswith("shardmlx: failed: rank 0 on mac1, ")
    assert "rank 1 on mac2" in line


def test_a_rank_that_is_killed_on_another_host_is_named(lab: Lab) -> None:
    """Open MPI would end this process when the connection breaks, before it can say so."""
    job, _ = run_until(lab, lambda ranks: os.kill(ranks[1], signal.SIGKILL))
    line = job.failure(*AFTER_A_KILL)
    assert line.startswith("shardmlx: failed: rank 0 on mac1, step ")
    assert "rank 1 on mac2 died" in line


def test_of_those_who_see_that_the_first_rank_was_killed_one_says_it(tmp_path: Path) -> None:
    """They hear each other, although Open MPI ends the job meanwhile."""
    with hosts(tmp_path, 3) as lab:
        job, _ = run_until(lab, lambda ranks: os.kill(ranks[0], signal.SIGKILL))
    assert "rank 0 on mac1 died" in job.failure(*AFTER_A_KILL)
