"""Replicas that divide the optimizer train as those that do not, and go on from each other's
checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from tests.helpers.checkpoints import Bytes, as_bytes
from tests.helpers.mpirun import events, train_well

STEPS = 6
OPTIONS = (
    *("--fine-tune-type", "full", "--num-layers", "-1", "--unfreeze-all", "--batch-size", "4"),
    *("--micro-batch-size", "1", "--learning-rate", "1e-3", "--iters", str(STEPS)),
    *("--steps-per-report", "1", "--val-batches", "0", "--checkpoint-every", "3"),
    *("--optimizer", "adamw", "--max-grad-norm", "0.5", "--keep-checkpoints", "9", "--no-pack"),
    *("--pipeline-stages", "1", "--dtype", "bfloat16", "--master-weights", "--loss-scale", "auto"),
)


class Run:
    """A finished run of two replicas: its losses and norms, and the tensors that it has left."""

    def __init__(self, directory: Path, model: Path, data: Path, *more: str) -> None:
        self.checkpoints = directory / "checkpoints"
        metrics = directory / "metrics"
        train_well(
            2,
            *("--model", model, "--data", data, "--adapter-path", directory / "out"),
            *("--metrics-file", metrics, "--checkpoint-dir", self.checkpoints, *OPTIONS),
            *more,
        )
        self.steps = {
            each["step"]: (each["loss"], each["grad_norm"]) for each in events(metrics, "train")
        }
        self.weights = tensors(directory / "out", "*.safetensors")

    def saved(self, kind: str, step: int = STEPS) -> Bytes:
        return tensors(self.checkpoints / f"step-{step:07d}", f"{kind}-*.safetensors")


def tensors(directory: Path, pattern: str) -> Bytes:
    found: Bytes = {}
    for path in sorted(directory.glob(pattern)):
        arrays = mx.load(str(path))
        assert isinstance(arrays, dict)
        assert not arrays.keys() & found.keys(), "each tensor is saved once"
        found |= as_bytes(arrays)
    return found


def test_losses_weights_and_checkpoints_are_the_same_to_the_bit(
    small_tied: Path, pirate: Path, tmp_path: Path
) -> None:
    """Float32 copies too. Other layouts and numbers of replicas are in test_resume.py."""
    whole = Run(tmp_path / "0", small_tied, pirate, "--zero", "0")
    parts = Run(tmp_path / "1", small_tied, pirate)
    assert parts.steps == whole.steps
    assert parts.weights == whole.weights
    for kind in ("weights", "optimizer"):
        assert parts.saved(kind) == whole.saved(kind)
    directory = parts.checkpoints / f"step-{STEPS:07d}"
    assert any(name.endswith(".master") for name in parts.saved("optimizer"))
    replicas = {path.stem.rpartition("-")[2] for path in directory.glob("optimizer-*-*")}
    assert replicas == {"00", "01"}
    for name, before, zero in (("a", whole, "1"), ("b", parts, "0")):
        place = tmp_path / name / "checkpoints" / "step-0000003"
        shutil.copytree(before.checkpoints / place.name, place)
        resumed = Run(tmp_path / name, small_tied, pirate, "--zero", zero)
        assert resumed.steps == {step: whole.steps[step] for step in (4, 5, 6)}
        assert resumed.weights == whole.weights
        assert resumed.saved("optimizer") == whole.saved("optimizer")


def test_divided_weights_train_as_whole_ones(small: Path, pirate: Path, tmp_path: Path) -> None:
    """With one micro-batch a step gradients are summed in the same order: equal to the bit."""
    one = ("--micro-batch-size", "2")
    whole = Run(tmp_path / "0", small, pirate, "--zero", "0", *one)
    parts = Run(tmp_path / "3", small, pirate, "--zero", "3", *one)
    assert parts.steps == whole.steps
    assert parts.weights == whole.weights
    for kind in ("weights", "optimizer"):
        assert parts.saved(kind) == whole.saved(kind)
    for name, before, zero in (("a", whole, "3"), ("b", parts, "0")):
        place = tmp_path / name / "checkpoints" / "step-0000003"
        shutil.copytree(before.checkpoints / place.name, place)
        resumed = Run(tmp_path / name, small, pirate, "--zero", zero, *one)
        assert resumed.steps == {step: whole.steps[step] for step in (4, 5, 6)}
        assert resumed.weights == whole.weights


@pytest.mark.parametrize("zero", ["1", "3"])
def test_float32_copies_begin_with_what_the_model_has_in_float32(
    zero: str, small: Path, pirate: Path, tmp_path: Path
) -> None:
    still = Run(tmp_path, small, pirate, "--zero", zero, "--learning-rate", "1e-30", "--iters", "3")
    copies = {
        name.removesuffix(".master"): content
        for name, content in still.saved("optimizer", 3).items()
        if name.endswith(".master")
    }
    assert copies == tensors(small, "*.safetensors")
    assert still.weights.keys() == copies.keys()
    assert all(still.weights[name] != content for name, content in copies.items())
