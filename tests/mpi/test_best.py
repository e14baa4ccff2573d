"""The best adapters are kept, and a run that gets no better stops."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from testbed.runs import events, in_file
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.mpirun import train_well

COMMON = (
    *("--num-layers", "-1", "--batch-size", "4", "--max-seq-length", "64", "--seed", "3"),
    *("--learning-rate", "3e-3", "--steps-per-eval", "2", "--val-batches", "-1"),
    *("--steps-per-report", "2", "--save-every", "2", "--iters", "40"),
)


def adapters(directory: Path) -> dict[str, np.ndarray]:
    arrays = load_arrays(directory / "adapters.safetensors")
    return {name: np.array(array) for name, array in arrays.items()}


def test_the_best_is_kept_and_training_stops_and_stays_stopped(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    """At this learning rate the loss soon rises again."""
    run: tuple[str | Path, ...] = ("--model", small, "--data", pirate, *COMMON)
    kept, metrics = tmp_path / "kept", tmp_path / "metrics.jsonl"
    flags: tuple[str | Path, ...] = (
        *("--keep", "best", *in_file(tmp_path / "config.yaml", early_stop=2)),
        *("--adapter-path", kept, "--checkpoint-dir", tmp_path / "checkpoints"),
    )
    job = train_well(2, *run, *flags, "--metrics-file", metrics)
    losses = {event["step"]: event["loss"] for event in events(metrics, "val")}
    assert min(losses, key=losses.__getitem__) < max(losses) < 40
    later = {step: loss for step, loss in losses.items() if step > 1}
    best = min(later, key=later.__getitem__)
    assert [*later][-1] == best + 4, "two validations after the best"
    # The weights of the best validation are those after the step before it.
    upto = ("--adapter-path", tmp_path / "upto", "--iters", str(best - 1))
    train_well(2, *run, *upto)
    expected, found = adapters(tmp_path / "upto"), adapters(kept)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    last = adapters(kept / "last")
    assert any(not np.array_equal(last[name], found[name]) for name in found)
    assert json.loads((kept / "adapter_config.json").read_text())["keep"] == "best"
    again = train_well(2, *run, *flags)
    assert f"before step {best}: training stops" in again.stdout
    assert f"before step {best}: training stops" in job.stdout
    for name, array in adapters(kept).items():
        assert np.array_equal(array, found[name])


def test_the_best_weights_of_ranks_that_share_layers_are_tested(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    """Each rank has a piece of them: rank 0 hands out what it has saved whole."""
    data, metrics = tmp_path / "data", tmp_path / "metrics.jsonl"
    shutil.copytree(pirate, data)
    shutil.copy(pirate / "valid.jsonl", data / "test.jsonl")
    flags = (*COMMON, "--learning-rate", "3e-2", "--iters", "6", "--train", "--test")
    place = ("--adapter-path", tmp_path / "out", "--metrics-file", metrics)
    layout = ("--tensor-parallel", "2", "--keep", "best", "--test-batches", "-1")
    train_well(2, "--model", small, "--data", data, *flags, *place, *layout)
    losses = [event["loss"] for event in events(metrics, "val") if event["step"] > 1]
    (test,) = events(metrics, "test")
    assert test["loss"] == pytest.approx(min(losses), rel=1e-5)
    assert len({*losses}) == len(losses)
