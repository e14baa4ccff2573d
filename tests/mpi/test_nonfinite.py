"""What is not finite is never trained on: the run stops, or passes over the step and says so.

What one process shows is in ``tests/unit/training/test_nonfinite.py``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from testbed.jobs import Job
from testbed.runs import events, in_file
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import train_well
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool


@pytest.fixture
def flags(small: Path, pirate: Path, tmp_path: Path) -> list[str | Path]:
    return [
        *("--model", small, "--data", pirate, "--val-batches", "0", "--schedule", "1f1b"),
        *("--iters", "5", "--steps-per-report", "1", "--adapter-path", tmp_path / "out"),
        *("--metrics-file", tmp_path / "metrics.jsonl", "--num-layers", "-1", "--no-pack"),
        *("--checkpoint-dir", tmp_path / "checkpoints"),
        *("--batch-size", "2", "--max-seq-length", "64"),
    ]


def overflow(n: int, flags: list[str | Path], *more: str | Path) -> Job:
    return run_in_pool(n, PROGRAMS / "nonfinite_rank.py", "3", *flags, *more)


def test_the_run_stops_and_keeps_what_it_had(flags: list[str | Path], tmp_path: Path) -> None:
    layout = "--pipeline-stages", "2"
    line = overflow(2, flags, *layout).failure(1)
    assert re.search(
        r"failed: step 3: the gradient of model\.layers\.4\.\S+ is not finite on rank [01] on \S+, "
        r"stage [01]: the run up to step 2 is in \S+/checkpoints/step-0000002; lower "
        r"--learning-rate and give another --checkpoint-dir, or pass over such steps with "
        r"on_nan: skip",
        line,
    )
    (saved,) = events(tmp_path / "metrics.jsonl", "checkpoint")
    assert saved["step"] == 2
    assert all(np.isfinite(array).all() for array in load_weights(tmp_path / "out").values())
    # What comes next is what would have come.
    job = train_well(2, *flags, *layout)
    assert "step-0000002: 3 of 5 steps are left" in job.stdout


def test_or_passes_over_the_step(flags: list[str | Path], tmp_path: Path) -> None:
    job = overflow(2, flags, *in_file(tmp_path / "skip.yaml", on_nan="skip")).well()
    assert "warning: step 3: the gradient of model.layers.4" in job.stdout
    assert "the update is skipped" in job.stdout
    reports = events(tmp_path / "metrics.jsonl", "train")
    assert [report["step"] for report in reports] == [1, 2, 4, 5]
    assert [report["skipped"] for report in reports] == [0, 0, 1, 1]
    assert all(math.isfinite(report["loss"]) for report in reports)
    (summary,) = events(tmp_path / "metrics.jsonl", "summary")
    assert summary["skipped"] == 1


def test_or_lowers_the_factor_of_the_loss(flags: list[str | Path], tmp_path: Path) -> None:
    scaled = in_file(tmp_path / "scaled.yaml", loss_scale="dynamic")
    job = overflow(2, flags, "--pipeline-stages", "2", *scaled).well()
    assert "step 3: the gradient of model.layers.4" in job.stdout
    assert "the update is skipped, and the loss scaled by 32768" in job.stdout
    reports = events(tmp_path / "metrics.jsonl", "train")
    found = [(each["step"], each["skipped"], each["loss_scale"]) for each in reports]
    assert found == [(1, 0, 65536), (2, 0, 65536), (4, 1, 32768), (5, 1, 32768)]
