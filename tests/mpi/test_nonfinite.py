"""What is not finite is never trained on: the run stops, or passes over the step and says so."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from testbed.jobs import Job
from testbed.runs import events, in_file
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import train, train_well
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
        r"--learning-rate, or pass over such steps with on_nan: skip",
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


def test_a_loss_that_is_not_finite_names_its_micro_batch(flags: list[str | Path]) -> None:
    line = train(2, *flags, "--learning-rate", "1e30", "--optimizer", "sgd").failure(1)
    assert re.search(r"failed: step \d: the loss of micro-batch \d is (nan|inf) on rank 1", line)


def digest(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def adapters(small: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("earlier") / "out"
    train_well(
        2,
        *("--model", small, "--data", pirate, "--val-batches", "0", "--num-layers", "-1"),
        *("--iters", "1", "--adapter-path", directory),
    )
    (directory / "0000005_adapters.safetensors").write_bytes(b"of an earlier run")
    return directory


@pytest.fixture
def earlier(adapters: Path, tmp_path: Path) -> dict[str, bytes]:
    """The adapters that an earlier run has left where the next will write."""
    return digest(Path(shutil.copytree(adapters, tmp_path / "out")))


def test_a_run_that_skips_most_of_its_updates_fails_and_saves_nothing(
    flags: list[str | Path], earlier: dict[str, bytes], tmp_path: Path
) -> None:
    """Its first update makes weights of 1e30, with which no other can be made."""
    skips = in_file(tmp_path / "skip.yaml", on_nan="skip")
    much: list[str | Path] = ["--learning-rate", "1e30", *skips, "--iters", "50"]
    job = train(1, *flags, *much, "--save-every", "1", "--checkpoint-every", "1")
    line = job.failure(1)
    assert "failed: step 7: " in line
    assert line.endswith(
        f"6 of the last 7 updates were skipped: nothing more is saved, what was in "
        f"{tmp_path}/out stays; lower --learning-rate, or give --dtype float32"
    )
    assert "warning: step 1: with its weights the loss of the last batch is not" in job.stdout
    assert "warning: step 3: 2 of the last 3 updates were skipped: nothing is saved" in job.stdout
    assert digest(tmp_path / "out") == earlier
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_weights_that_are_not_finite_replace_nothing(
    flags: list[str | Path], earlier: dict[str, bytes], tmp_path: Path
) -> None:
    """Of the last update there is no next step that would show it."""
    line = train(2, *flags, "--learning-rate", "3e38", "--iters", "1").failure(1)
    assert re.search(
        r"failed: step 1: the weight model\.layers\.\d\.\S+ is not finite on rank [01] on \S+, "
        r"stage [01]: nothing more is saved, what was in \S+/out stays; lower --learning-rate, or "
        r"give --dtype float32$",
        line,
    )
    assert digest(tmp_path / "out") == earlier


def test_weights_that_give_no_finite_loss_replace_nothing_where_steps_may_be_skipped(
    flags: list[str | Path], earlier: dict[str, bytes], tmp_path: Path
) -> None:
    """One of two updates was made, and no weight is infinite."""
    skips = in_file(tmp_path / "skip.yaml", on_nan="skip")
    much: list[str | Path] = ["--learning-rate", "1e30", *skips, "--iters", "2"]
    line = train(1, *flags, *much).failure(1)
    assert "failed: step 2: with its weights the loss of the last batch is not finite: " in line
    assert digest(tmp_path / "out") == earlier
