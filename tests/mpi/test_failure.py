"""A failure at run time names rank, host, stage and action, and ends the whole job."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from tests.mpi.mpirun import PROGRAMS, Job, mpirun

HOST = re.escape(socket.gethostname().split(".")[0])


def run(how: str, model: Path, data: Path, tmp_path: Path) -> Job:
    """Three stages; the one in the middle fails in the second step of four micro-batches."""
    arguments: list[str | Path] = ["--model", model, "--data", data, "--num-layers", "-1"]
    arguments += ["--adapter-path", tmp_path / "adapters", "--micro-batch-size", "1"]
    arguments += ["--val-batches", "0", "--timeout", "3"]
    job = mpirun(3, PROGRAMS / "failing_rank.py", how, *arguments)
    assert job.returncode == 1, job.output
    assert "Traceback" not in job.output
    assert job.error_lines, job.output
    return job


def test_an_error_in_a_stage(small: Path, pirate: Path, tmp_path: Path) -> None:
    job = run("raise", small, pirate, tmp_path)
    (line,) = job.error_lines
    assert re.fullmatch(
        rf"shardmlx: failed: rank 1 on {HOST}, stage 1, 1F1: RuntimeError: Insufficient Memory",
        line,
    )


def test_a_stage_that_nothing_is_heard_of(small: Path, pirate: Path, tmp_path: Path) -> None:
    job = run("hang", small, pirate, tmp_path)
    for line in job.error_lines:
        assert re.fullmatch(
            rf"shardmlx: failed: rank [02] on {HOST}, stage [02], (0RECV_B|2RECV_F)\d, waiting for "
            rf"rank 1 on {HOST}: nothing came for 3 s \(see --timeout\)",
            line,
        )
