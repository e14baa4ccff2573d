"""A failure at run time names rank, host, stage and action, and ends the whole job."""

from __future__ import annotations

import math
import re
import socket
from pathlib import Path

import pytest

from shardmlx.distributed.times import silence_limit
from testbed.jobs import AFTER_A_KILL, patience
from tests.helpers.mpirun import mpirun
from tests.helpers.programs import PROGRAMS

HOST = re.escape(socket.gethostname().split(".")[0])
DIED = r"died \(was it killed, or out of memory\?\); it was last in .+"


def silent(timeout: int) -> str:
    """Return the pattern of what is said of a rank whose process is stopped."""
    life = f"has given no sign of life for {silence_limit(timeout):g} s"
    return rf"{life}(: its process is stopped)?; it was last in .+"


def message(stage: int | str) -> str:
    """Return the pattern of a message that a stage waits for, or sends, in plain words."""
    return (
        rf"stage {stage}, (waiting for|sending) the (gradient|hidden states) of micro-batch \d "
        rf"(from|to) rank \d on {HOST} \({stage}\w+\)"
    )


SECONDS_TO_START = 8.0
"""Time that ranks have at least: until MPI has started, --timeout bounds that, too."""


@pytest.fixture
def arguments(small: Path, pirate: Path, tmp_path: Path) -> list[str | Path]:
    """A stage a rank, steps of four micro-batches."""
    return [
        *("--model", small, "--data", pirate, "--num-layers", "-1", "--micro-batch-size", "1"),
        *("--adapter-path", tmp_path / "adapters"),
        *("--schedule", "1f1b", "--no-pack"),
    ]


def check(
    ranks: int,
    rank: int,
    when: str,
    how: str,
    arguments: list[str | Path],
    message: str,
    timeout: int = 60,
) -> None:
    """Let a rank fail; the job ends without leaving a process behind, and with this one line."""
    program = PROGRAMS / "failing_rank.py"
    arguments = [*arguments, "--val-batches", "0", "--timeout", str(timeout)]
    job = mpirun(ranks, program, str(rank), when, how, *arguments)
    line = job.failure(*(AFTER_A_KILL if how == "kill" else {1}))
    assert re.fullmatch(f"shardmlx: failed: {message}", line), line


def test_an_error(arguments: list[str | Path]) -> None:
    """A RuntimeError is what MLX raises where memory does not suffice."""
    said = r"stage 1, forward of micro-batch 1 \(1F1\): RuntimeError: Insufficient Memory"
    check(2, 1, "step", "raise", arguments, f"rank 1 on {HOST}, {said}")


def test_a_rank_that_is_killed(arguments: list[str | Path]) -> None:
    """Rank 0 watches all others; all others watch rank 0, as when it is stopped below, or killed in
    ``tests/lab/test_two_hosts.py``."""
    said = f"rank 0 on {HOST}, {message(0)}: rank 1 on {HOST} {DIED}"
    check(3, 1, "step", "kill", arguments, said)


def test_a_rank_that_is_stopped(arguments: list[str | Path]) -> None:
    """It is named a second before others may give up, where that is more than three seconds. After
    so long a time its peers' report does not reach it: it must not blame them as all are ended."""
    timeout = max(18, math.ceil(patience(5)))
    said = f"rank [12] on {HOST}, {message('[12]')}: rank 0 on {HOST} {silent(timeout)}"
    check(3, 0, "step", "stop", arguments, said, timeout)


@pytest.mark.parametrize(
    ("rank", "command", "how"),
    [
        (1, "shardmlx.loading.rank_setup.ModelWorker.open", "kill"),
        (0, "shardmlx.training.worker.TrainWorker.load", "kill"),
        (1, "shardmlx.training.run_worker.RunWorker.save", "stop"),
    ],
)
def test_a_rank_that_is_lost_at_a_command(
    rank: int, command: str, how: str, arguments: list[str | Path], tmp_path: Path
) -> None:
    """All others, in one process: ``tests/unit/training/test_every_command.py``."""
    other = 1 - rank
    doing = "(answer to|saving) .+" if other == 0 else "next command"
    doing += f", waiting for rank {rank} on {HOST}"
    if how == "kill":  # maybe before the other rank has ended its own part of the command
        doing = f"({doing}|{command.rpartition('.')[2]})"
    timeout = math.ceil(max(SECONDS_TO_START, patience(5))) if how == "stop" else 60
    ends = rf"rank {rank} on {HOST} {DIED if how == 'kill' else silent(timeout)}"
    said = rf"rank {other}( on {HOST})?, {doing}: {ends}"
    kept = ("--checkpoint-dir", tmp_path / "kept", "--checkpoint-every", "2", "--iters", "2")
    check(2, rank, command, how, [*arguments, *kept], said, timeout)


def test_a_rank_that_does_not_come_to_the_start(arguments: list[str | Path]) -> None:
    timeout = math.ceil(max(SECONDS_TO_START, patience(3)))
    said = rf"starting MPI: rank 1 on {HOST} did not come within {timeout} s \(see --timeout\)"
    check(2, 1, "start", "stop", arguments, f"rank 0 on {HOST}: {said}", timeout)


def test_a_stage_that_computes_for_ever(arguments: list[str | Path]) -> None:
    """Its process gives signs of life: those that wait for it give up."""
    timeout = math.ceil(max(SECONDS_TO_START, patience(3)))
    where = rf"waiting for the gradient of micro-batch \d from rank 1 on {HOST} \(0RECV_B\d\)"
    said = rf"rank 0 on {HOST}, stage 0, {where}: nothing came for {timeout} s \(see --timeout\)"
    check(2, 1, "step", "hang", arguments, said, timeout)
