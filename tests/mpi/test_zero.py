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
)
LAYOUTS = {"2 x 1": (2, ["--pipeline-stages", "1"]), "2 x 2": (4, ["--pipeline-stages", "2"])}


class Run:
    """A finished run: its losses and norms, and the tensors that it has left."""

    def __init__(self, directory: Path, model: Path, data: Path, layout: str, *more: str) -> None:
        ranks, flags = LAYOUTS[layout]
        self.checkpoints = directory / "checkpoints"
        metrics = directory / "metrics"
        train_well(
            ranks,
            *("--model", model, "--data", data, "--adapter-path", directory / "out"),
            *("--metrics-file", metrics, "--checkpoint-dir", self.checkpoints, *OPTIONS),
            *flags,
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


MASTERS = ("--dtype", "bfloat16", "--master-weights", "--loss-scale", "auto")


@pytest.mark.parametrize(("layout", "more"), [("2 x 1", MASTERS), ("2 x 2", ())])
def test_losses_weights_and_checkpoints_are_the_same_to_the_bit(
    layout: str, more: tuple[str, ...], small_tied: Path, pirate: Path, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "0", small_tied, pirate, layout, "--zero", "0", *more)
    parts = Run(tmp_path / "1", small_tied, pirate, layout, *more)
    assert parts.steps == whole.steps
    assert parts.weights == whole.weights
    for kind in ("weights", "optimizer"):
        assert parts.saved(kind) == whole.saved(kind)
    directory = parts.checkpoints / f"step-{STEPS:07d}"
    has_copies = any(name.endswith(".master") for name in parts.saved("optimizer"))
    assert has_copies == bool(more)
    replicas = {path.stem.rpartition("-")[2] for path in directory.glob("optimizer-*-*")}
    assert replicas == {"00", "01"}
    ways = (("a", whole, ("--zero", "1")), ("b", parts, ("--zero", "0")))
    for name, before, flags in ways if more else ways[1:]:
        place = tmp_path / name / "checkpoints" / "step-0000003"
        shutil.copytree(before.checkpoints / place.name, place)
        resumed = Run(tmp_path / name, small_tied, pirate, layout, *flags, *more)
        assert resumed.steps == {step: whole.steps[step] for step in (4, 5, 6)}
        assert resumed.weights == whole.weights
        assert resumed.saved("optimizer") == whole.saved("optimizer")


def test_how_gradients_travel_and_are_scaled(
    small_tied: Path, pirate: Path, tmp_path: Path
) -> None:
    """A power of two changes no bit of float32; bfloat16 hardly changes the losses."""
    without = Run(tmp_path / "32", small_tied, pirate, "2 x 1")
    scaled = Run(tmp_path / "4096", small_tied, pirate, "2 x 1", "--loss-scale", "4096")
    assert scaled.steps == without.steps
    assert scaled.weights == without.weights
    assert scaled.saved("optimizer") == without.saved("optimizer")
    short = Run(tmp_path / "16", small_tied, pirate, "2 x 1", "--sum-dtype", "bfloat16")
    assert short.weights != without.weights
    for step, (loss, norm) in short.steps.items():
        assert loss == pytest.approx(without.steps[step][0], rel=1e-3)
        assert norm == pytest.approx(without.steps[step][1], rel=1e-2)
