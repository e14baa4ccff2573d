"""``shardmlx.profile`` under mpirun, and runs that are planned from what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.planning.facts.profile_file import read_profile
from testbed.jobs import Job
from testbed.runs import events
from testbed.small_models import small_directory
from tests.helpers.mpirun import mpirun
from tests.helpers.rank_pool import run_in_pool

LAYERS = 3
"""So few that their bytes are planned by rule: to measure these takes most of a profile's time."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def model(small_tokenizer: Path, directory: Path) -> Path:
    return small_directory(directory / "model", small_tokenizer, num_hidden_layers=LAYERS)


def profile(ranks: int, model: Path, *arguments: str | Path, cwd: Path) -> Job:
    return run_in_pool(ranks, "-m", "shardmlx.profile", model, *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def measured(model: Path, directory: Path) -> Job:
    return profile(2, model, "--num-layers", "-1", "--lengths", "64", cwd=directory)


@pytest.fixture(scope="module")
def planned(measured: Job, model: Path, pirate: Path, directory: Path) -> Job:
    """A run whose layers were divided by measured times, in processes that hold nothing else."""
    assert measured.returncode == 0
    return mpirun(
        2,
        *("-m", "shardmlx.train"),
        *("--model", model, "--data", pirate, "--num-layers", "-1", "--batch-size", "4"),
        *("--iters", "3", "--max-seq-length", "64", "--val-batches", "0"),
        *("--pipeline-stages", "2", "--partitioner", "balanced", "--profile", "profile.json"),
        *("--metrics-file", "metrics.jsonl", "--adapter-path", "planned"),
        cwd=directory,
    ).well()


def test_every_rank_measures_every_part(measured: Job, directory: Path) -> None:
    assert measured.returncode == 0
    assert "Wrote profile.json" in measured.stdout
    machines = read_profile(directory / "profile.json").machines
    assert len(machines) == 2
    for machine in machines:
        assert [(each.rows, each.length) for each in machine.samples] == [(1, 64)]
        for sample in machine.samples:
            layer = sample.layer
            assert min(layer.forward, layer.input_gradient, layer.weight_gradient) > 0
            assert layer.update > 0
            assert sample.frozen.forward > 0


def test_a_run_says_what_was_predicted_and_what_was_measured(planned: Job, directory: Path) -> None:
    header = next(line for line in planned.stdout.splitlines() if "peak memory" in line)
    assert header.split()[-1] == "predicted"
    assert "Step: " in planned.stdout
    (summary,) = events(directory / "metrics.jsonl", "summary")
    predicted = summary["predicted"]
    assert sum(predicted["num_layers"]) == LAYERS
    assert predicted["step_seconds"] > 0
    for rank, peak in zip(summary["ranks"], predicted["peak_memory_bytes"], strict=True):
        assert rank["peak_memory_bytes"] == pytest.approx(peak, rel=0.25)
    (start,) = events(directory / "metrics.jsonl", "start")
    assert 0 < start["schedule"]["makespan_seconds"] <= start["predicted"]["data"]["step_seconds"]
