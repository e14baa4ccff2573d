"""Signals to mpirun and to single ranks: what asks a run to stop, and what ends it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from testbed.jobs import SECONDS_TO_END, Job, Running, patience
from tests.helpers.mpirun import mpirun
from tests.helpers.programs import PROGRAMS


def wait_for(paths: Collection[Path]) -> None:
    """Wait until ranks have written these files."""
    end = time.monotonic() + patience(60.0)
    while not all(map(Path.exists, paths)) and time.monotonic() < end:
        time.sleep(0.02)


def run(
    phase: str,
    directory: Path,
    meanwhile: Callable[[int, dict[int, int]], None],
    ranks: int = 2,
    timeout: float = 60.0,
) -> Job:
    """``meanwhile`` is given the process ids of mpirun and of the ranks."""

    def wait(mpirun_pid: int) -> None:
        files = {rank: directory / str(rank) for rank in range(ranks)}
        wait_for([*files.values()])
        meanwhile(mpirun_pid, {rank: int(file.read_text()) for rank, file in files.items()})

    return mpirun(
        ranks,
        *(PROGRAMS / "until_stopped.py", phase, directory, str(timeout)),
        timeout=60.0 + SECONDS_TO_END,
        meanwhile=wait,
    )


def test_a_signal_to_any_rank_stops_the_run_in_order(tmp_path: Path) -> None:
    job = run("training", tmp_path, lambda mpirun, ranks: os.kill(ranks[2], signal.SIGINT), 3)
    assert job.failure(128 + signal.SIGINT) == "shardmlx: stopped by SIGINT: saved"


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    def twice(mpirun: int, ranks: dict[int, int]) -> None:
        os.kill(ranks[1], signal.SIGTERM)
        wait_for([tmp_path / "1.saves"])
        os.kill(ranks[1], signal.SIGTERM)

    job = run("saving", tmp_path, twice)
    assert job.failure(128 + signal.SIGTERM) == "shardmlx: interrupted by SIGTERM"


def test_a_signal_before_training_ends_it_at_once(tmp_path: Path) -> None:
    job = run("loading", tmp_path, lambda mpirun, ranks: os.kill(mpirun, signal.SIGUSR1))
    assert job.failure(128 + signal.SIGUSR1) == "shardmlx: interrupted by SIGUSR1"


def test_one_process_without_mpirun_says_one_line_and_open_mpi_nothing(tmp_path: Path) -> None:
    """MPI_Abort would print a block about a help file that only mpirun has."""
    command = (sys.executable, PROGRAMS / "until_stopped.py", "loading", tmp_path, "60")
    with Running(command) as running:
        running.until((tmp_path / "0").exists)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(patience(SECONDS_TO_END)) == 128 + signal.SIGTERM
        assert running.job().output == "shardmlx: interrupted by SIGTERM\n"


def test_mpirun_itself_ends_its_ranks_at_once(tmp_path: Path) -> None:
    """It leaves them 0.25 s, and prints nothing that they say: no checkpoint, no line."""
    job = run("training", tmp_path, lambda mpirun, ranks: os.kill(mpirun, signal.SIGINT))
    assert job.returncode == 1
    assert job.error_lines == []


def test_ranks_end_after_an_mpirun_that_is_killed(tmp_path: Path) -> None:
    job = run("training", tmp_path, lambda mpirun, ranks: os.kill(mpirun, signal.SIGKILL))
    assert job.returncode == -signal.SIGKILL


def test_a_job_that_is_stopped_for_longer_than_the_timeout_goes_on(tmp_path: Path) -> None:
    """As by Ctrl-Z, or a laptop that is closed."""
    timeout = patience(3.0)

    def pause(mpirun: int, ranks: dict[int, int]) -> None:
        # Rank 0 first and last, so that the other waits for it.
        for number, order in ((signal.SIGSTOP, (0, 1)), (signal.SIGCONT, (1, 0))):
            for rank in order:
                os.kill(ranks[rank], number)
                time.sleep(0.3)
            time.sleep(timeout + 1.0)
        os.kill(mpirun, signal.SIGUSR1)

    job = run("training", tmp_path, pause, timeout=timeout)
    assert job.failure(128 + signal.SIGUSR1) == "shardmlx: stopped by SIGUSR1: saved"
