"""Bad input ends on all ranks, in one line that names the value and the remedy, with status 2.

What rank 0 alone finds is tested as functions: options and outputs in
``tests/unit/training/test_plan_run.py``, data beside it, the model in ``tests/unit/loading``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.jobs import Job
from tests.helpers.mpirun import mpirun, train


@pytest.fixture
def model(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "model"))


@pytest.fixture
def data(pirate: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pirate, tmp_path / "data"))


def in_a_job_of_its_own(ranks: int, *arguments: str | Path) -> Job:
    return mpirun(ranks, "-m", "shardmlx.train", *arguments)


def refused(
    tmp_path: Path, ranks: int, *flags: str | Path, start: Callable[..., Job] = train
) -> str:
    """Return the one line with which a job must end; nothing else may be left of it."""
    output, metrics = tmp_path / "adapters", tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    job = start(
        ranks,
        *("--model", tmp_path / "model", "--data", tmp_path / "data", "--metrics-file", metrics),
        *("--adapter-path", output, "--iters", "1", "--batch-size", "2", "--num-layers", "-1"),
        *flags,
    )
    line = job.failure(2)
    assert "loaded in" not in job.output
    assert not output.exists()
    assert metrics.read_text() == "{}\n", "those of the last run stay"
    assert line.startswith("shardmlx: error: ")
    return line.removeprefix("shardmlx: error: ")


def test_what_rank_0_finds_in_the_plan_and_what_all_find_in_the_model(
    model: Path, data: Path, tmp_path: Path
) -> None:
    line = refused(tmp_path, 2, "--memory-limit", "0.6MiB")
    assert line.startswith("rank ")
    assert "--memory-limit " in line
    (model / "config.json").unlink()
    assert "config.json" in refused(tmp_path, 2)


def test_a_line_that_is_not_json(model: Path, data: Path, tmp_path: Path) -> None:
    path = data / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], '{"messages": [', *lines[4:]]) + "\n")
    line = refused(tmp_path, 2, start=in_a_job_of_its_own)
    assert line.startswith(f"{path}:5 ")
