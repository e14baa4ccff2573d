"""Replicas that divide the optimizer, or the weights, train as those that do not, and go on from
each other's checkpoints; also after one was killed in the middle of an exchange."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from testbed.jobs import AFTER_A_KILL
from testbed.runs import events, in_file
from tests.helpers.checkpoints import Bytes, as_bytes
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.mpirun import mpirun, train_well
from tests.helpers.programs import PROGRAMS

STEPS = 4
OPTIONS = (
    *("--fine-tune-type", "full", "--num-layers", "-1", "--batch-size", "4"),
    *("--micro-batch-size", "1", "--learning-rate", "1e-3", "--iters", str(STEPS)),
    *("--steps-per-report", "1", "--val-batches", "0", "--checkpoint-every", "2"),
    *("--optimizer", "adamw", "--no-pack"),
    *("--pipeline-stages", "1", "--dtype", "bfloat16"),
)
ONLY_IN_FILE = {
    "max_grad_norm": 0.5,
    "unfreeze_all": True,
    "master_weights": True,
    "keep_checkpoints": 9,
}


def flags_of(directory: Path, model: Path, data: Path, *more: str | Path) -> list[str | Path]:
    directory.mkdir(exist_ok=True)
    return [
        *("--model", model, "--data", data, "--adapter-path", directory / "out"),
        *("--metrics-file", directory / "metrics", "--checkpoint-dir", directory / "checkpoints"),
        *in_file(directory / "config.yaml", **ONLY_IN_FILE),
        *OPTIONS,
        *more,
    ]


class Run:
    """A finished run, of two replicas unless told otherwise: its losses and norms, and the tensors
    that it has left."""

    def __init__(
        self, directory: Path, model: Path, data: Path, *more: str | Path, ranks: int = 2
    ) -> None:
        self.checkpoints = directory / "checkpoints"
        train_well(ranks, *flags_of(directory, model, data, *more))
        self.steps = {
            each["step"]: (each["loss"], each["grad_norm"])
            for each in events(directory / "metrics", "train")
        }
        self.weights = tensors(directory / "out", "*.safetensors")

    def saved(self, kind: str, step: int = STEPS) -> Bytes:
        return tensors(self.checkpoints / f"step-{step:07d}", f"{kind}-*.safetensors")


def tensors(directory: Path, pattern: str) -> Bytes:
    return as_bytes(load_arrays(*directory.glob(pattern)))


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
    place = tmp_path / "resumed" / "checkpoints" / "step-0000002"
    shutil.copytree(parts.checkpoints / place.name, place)
    resumed = Run(tmp_path / "resumed", small_tied, pirate, "--zero", "0")
    assert resumed.steps == {step: whole.steps[step] for step in (3, 4)}
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
        place = tmp_path / name / "checkpoints" / "step-0000002"
        shutil.copytree(before.checkpoints / place.name, place)
        resumed = Run(tmp_path / name, small, pirate, "--zero", zero, *one)
        assert resumed.steps == {step: whole.steps[step] for step in (3, 4)}
        assert resumed.weights == whole.weights
    # Four replicas add gradients in another order.
    place = tmp_path / "four" / "checkpoints" / "step-0000002"
    shutil.copytree(parts.checkpoints / place.name, place)
    more = ("--zero", "3", "--micro-batch-size", "1")
    resumed = Run(tmp_path / "four", small, pirate, *more, ranks=4)
    for step in (3, 4):
        assert resumed.steps[step] == pytest.approx(whole.steps[step], rel=1e-2)


KILLS = [
    ("scatter:4", "int8", ("--zero", "1", "--replica-rows", "3,1")),
    ("gathering:4", "float32", ("--zero", "3", "--recompute", "full")),
]


@pytest.mark.parametrize(("when", "sums", "more"), KILLS)
def test_a_replica_that_is_killed_in_an_exchange_costs_no_more_than_steps(
    when: str,
    sums: str,
    more: tuple[str | Path, ...],
    small: Path,
    pirate: Path,
    tmp_path: Path,
) -> None:
    """It is named, and the run goes on from its newest checkpoint as if nothing had happened: to
    the bit, also what int8 rounds off of sums."""
    more = (*more, *in_file(tmp_path / "sums.yaml", sum_dtype=sums))
    whole = Run(tmp_path / "whole", small, pirate, *more)
    killed = tmp_path / "killed"
    arguments = [*flags_of(killed, small, pirate, *more), "--timeout", "60"]
    line = mpirun(2, PROGRAMS / "failing_rank.py", "1", when, "kill", *arguments).failure(
        *AFTER_A_KILL
    )
    assert re.search(r"failed: rank \d on .+: rank 1 on \S+ died \(was it killed", line), line
    assert [each["step"] for each in events(killed / "metrics", "train")] == [1, 2, 3]
    resumed = Run(killed, small, pirate, *more)
    assert {step: resumed.steps[step] for step in (3, 4)} == {
        step: whole.steps[step] for step in (3, 4)
    }
    assert resumed.weights == whole.weights
    assert resumed.saved("optimizer") == whole.saved("optimizer")
