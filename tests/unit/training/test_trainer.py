"""What a run writes over what was there before: nothing that it has not trained."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.errors import AgreedFailure
from shardmlx.training.command import train_model
from testbed.rows import write
from tests.helpers.local_transport import alone
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.saved_adapters import write_earlier_outputs

STILL: dict[str, Any] = {"lr_schedule": {"name": "linear_schedule", "arguments": [0, 0, 1]}}
FULL: dict[str, Any] = {"fine_tune_type": "full", "save_every": 1}
TOO_SMALL: dict[str, Any] = {"learning_rate": 1e-30}

pytestmark = pytest.mark.usefixtures("limited_to_a_test")


@pytest.fixture
def options(small: Path, pirate: Path, tmp_path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": 2, "iters": 2, "val_batches": 0, "checkpoint_every": 1}
    options |= {"num_layers": 2}
    options |= {"model": str(small), "data": str(pirate), "adapter_path": str(tmp_path / "out")}
    return options | {"checkpoint_dir": str(tmp_path / "checkpoints")}


def run(options: dict[str, Any]) -> None:
    config = TrainConfig.from_flat(**options)
    alone(lambda rank: train_model(config, rank))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "still",
    [
        pytest.param(STILL | {"save_every": 1}, id="no rate"),
        pytest.param(STILL | FULL, id="no rate, full"),
        pytest.param(TOO_SMALL | FULL, id="a rate below the weights' last bit"),
    ],
)
def test_a_run_that_moves_no_weight_replaces_nothing(
    still: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    write_earlier_outputs(tmp_path / "out", b"of an earlier run")
    before = contents(tmp_path / "out")
    with pytest.raises(AgreedFailure, match=r"has moved a weight.*--learning-rate"):
        run(options | still)
    assert contents(tmp_path / "out") == before
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_nothing_is_saved_before_the_first_update(options: dict[str, Any], tmp_path: Path) -> None:
    run(options | {"iters": 3, "grad_accumulation_steps": 2, "save_every": 1})
    copies = sorted((tmp_path / "out").glob("0*"))
    assert [path.name[:7] for path in copies] == ["0000002", "0000003"]
    for path in copies:
        assert any(
            mx.any(array).item() for name, array in load_arrays(path).items() if "lora_b" in name
        )


@pytest.mark.parametrize("later", [True, False])
def test_a_finished_run_replaces_only_what_is_older_than_its_checkpoint(
    options: dict[str, Any], tmp_path: Path, later: bool
) -> None:
    run(options)
    path = tmp_path / "out" / "adapters.safetensors"
    trained = path.read_bytes()
    path.write_bytes(b"of another run")
    mark = tmp_path / "checkpoints" / "step-0000002" / "COMMITTED"
    since = mark.stat().st_mtime + (5 if later else -5)
    os.utime(path, (since, since))
    run(options)
    assert path.read_bytes() == (b"of another run" if later else trained)
    shutil.rmtree(tmp_path / "out")
    run(options)
    assert path.read_bytes() == trained


SHORT = {"prompt": "hi", "completion": "ho"}
ONLY_PROMPT = {"prompt": "hello " * 50, "completion": "ho"}


def events(options: dict[str, Any], kind: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []

    def listen(name: str, values: Mapping[str, Any]) -> None:
        found.extend([values] if name == kind else [])

    config = TrainConfig.from_flat(**options)
    alone(lambda rank: train_model(config, rank, on_event=listen))
    return found


def losses(options: dict[str, Any], kind: str, **more: Any) -> list[float]:
    return [each["loss"] for each in events({**options, **more}, kind)]


def test_what_has_no_token_to_learn_is_no_part_of_a_loss(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options |= {"mask_prompt": True, "max_seq_length": 60, "batch_size": 1, "val_batches": -1}
    options |= {"checkpoint_dir": None}
    rows = [SHORT, ONLY_PROMPT]
    alone = {"data": write(tmp_path / "alone", train=[SHORT], valid=[SHORT]), "iters": 1}
    mixed = {"data": write(tmp_path / "mixed", train=rows, valid=rows), "steps_per_report": 2}
    expected = losses(options, "train", **alone)
    assert losses(options, "train", **mixed) == pytest.approx(expected)
    # As one update of two steps: its gradient is that of the one that counts.
    weights = load_arrays(tmp_path / "out" / "adapters.safetensors")
    losses(options, "train", **mixed, grad_accumulation_steps=2)
    for name, array in load_arrays(tmp_path / "out" / "adapters.safetensors").items():
        assert mx.allclose(array, weights[name], atol=1e-6).item(), name
    first, *_ = losses(options, "val", **mixed)
    assert first == pytest.approx(losses(options, "val", **alone)[0])


def test_a_run_of_steps_without_a_token_to_learn_saves_nothing(
    options: dict[str, Any], tmp_path: Path
) -> None:
    data = write(tmp_path / "rows", train=[SHORT, ONLY_PROMPT])
    options |= {"mask_prompt": True, "max_seq_length": 60, "batch_size": 1, "iters": 1}
    options |= {"data": data, "save_every": 1, "optimizer": "adamw"}
    outcomes = []
    for seed in range(6):
        is_counted = np.random.RandomState(seed).permutation(2)[0] == 0
        out = tmp_path / f"out-{seed}"
        more = {"seed": seed, "adapter_path": str(out), "checkpoint_dir": str(out / "run")}
        if is_counted:
            run(options | more)
        else:
            with pytest.raises(AgreedFailure, match="no update was made"):
                run(options | more)
        assert (out / "adapters.safetensors").exists() == is_counted
        outcomes.append(is_counted)
    assert {*outcomes} == {True, False}
