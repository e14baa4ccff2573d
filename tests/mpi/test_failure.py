"""A failure at run time names rank, host, stage and action, and ends the whole job."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.helpers.jobs import AFTER_A_KILL, PROGRAMS, Job
from tests.helpers.mpirun import mpirun

HOST = re.escape(socket.gethostname().split(".")[0])
DIED = r"died \(was it killed, or out of memory\?\); it was last in .+"
SILENT = r"has given no sign of life for 4 s(: its process is stopped)?; it was last in .+"


def message(stage: int | str) -> str:
    """Return the pattern of a message that a stage waits for, or sends, in plain words."""
    return (
        rf"stage {stage}, (waiting for|sending) the (gradient|hidden states) of micro-batch \d "
        rf"(from|to) rank \d on {HOST} \({stage}\w+\)"
    )


@pytest.fixture
def arguments(small: Path, pirate: Path, tmp_path: Path) -> list[str | Path]:
    """A stage a rank, steps of four micro-batches."""
    return [
        *("--model", small, "--data", pirate, "--num-layers", "-1", "--micro-batch-size", "1"),
        *("--adapter-path", tmp_path / "adapters", "--timeout", "3"),
        *("--schedule", "1f1b", "--no-pack"),
    ]


def fail(
    ranks: int, rank: int, when: str, how: str, arguments: list[str | Path]
) -> tuple[Job, str]:
    """The job, which has ended without leaving a process behind, and its one error line."""
    program = PROGRAMS / "failing_rank.py"
    job = mpirun(ranks, program, str(rank), when, how, *arguments, "--val-batches", "0")
    assert "Traceback" not in job.output
    assert len(job.error_lines) == 1, job.output
    (line,) = job.error_lines
    return job, line


def test_an_error(arguments: list[str | Path]) -> None:
    """A RuntimeError is what MLX raises where memory does not suffice."""
    job, line = fail(2, 1, "step", "raise", arguments)
    assert job.returncode == 1, job.output
    assert re.fullmatch(
        rf"shardmlx: failed: rank 1 on {HOST}, stage 1, forward of micro-batch 1 \(1F1\): "
        r"RuntimeError: Insufficient Memory",
        line,
    )


@pytest.mark.parametrize(
    ("rank", "reporter", "where"), [(1, "0", message(0)), (0, "[12]", message("[12]"))]
)
def test_a_rank_that_is_killed(
    rank: int, reporter: str, where: str, arguments: list[str | Path]
) -> None:
    """Rank 0 watches all others, and all others watch rank 0: either may be the first to say so."""
    job, line = fail(3, rank, "step", "kill", arguments)
    assert job.returncode in AFTER_A_KILL, job.output
    assert re.fullmatch(
        rf"shardmlx: failed: rank {reporter} on {HOST}, {where}: "
        rf"rank {rank} on {HOST} {DIED}",
        line,
    ), line


def test_a_rank_that_is_stopped(arguments: list[str | Path]) -> None:
    """It is named a second before others may give up, where that is more than three seconds."""
    job, line = fail(3, 0, "step", "stop", [*arguments, "--timeout", "5"])
    assert job.returncode == 1, job.output
    assert re.fullmatch(
        rf"shardmlx: failed: rank [12] on {HOST}, {message('[12]')}: rank 0 on {HOST} {SILENT}",
        line,
    ), line


def test_a_rank_that_does_not_come_to_the_start(arguments: list[str | Path]) -> None:
    job, line = fail(2, 1, "start", "stop", arguments)
    assert job.returncode == 1, job.output
    assert re.fullmatch(
        rf"shardmlx: failed: rank 0 on {HOST}: starting MPI: not all ranks came within 3 s "
        r"\(see --timeout\)",
        line,
    )


def test_a_stage_that_computes_for_ever(arguments: list[str | Path]) -> None:
    """Its process gives signs of life: those that wait for it give up."""
    job, line = fail(2, 1, "step", "hang", arguments)
    assert job.returncode == 1, job.output
    assert re.fullmatch(
        rf"shardmlx: failed: rank 0 on {HOST}, stage 0, waiting for the gradient of "
        rf"micro-batch \d from rank 1 on {HOST} \(0RECV_B\d\): nothing came for 3 s "
        r"\(see --timeout\)",
        line,
    )
