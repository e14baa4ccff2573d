"""Weights and losses that are not finite replace nothing, and the run says where they came from.

A step whose gradients overflow is in ``tests/mpi/test_nonfinite.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.errors import AgreedFailure
from shardmlx.training.command import train_model
from tests.helpers.local_transport import alone
from tests.helpers.saved_adapters import write_earlier_outputs

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

TAMER = "lower --learning-rate, or give --dtype float32"


@pytest.fixture
def options(small: Path, pirate: Path, tmp_path: Path) -> dict[str, Any]:
    place = {"adapter_path": str(tmp_path / "out"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    options: dict[str, Any] = {"model": str(small), "data": str(pirate), **place}
    options |= {"val_batches": 0, "iters": 5, "steps_per_report": 1, "num_layers": -1}
    return options | {"batch_size": 2, "max_seq_length": 64, "pack": False, "schedule": "1f1b"}


@pytest.fixture
def earlier(tmp_path: Path) -> dict[str, bytes]:
    """The adapters that an earlier run has left where the next will write."""
    write_earlier_outputs(tmp_path / "out", b"of an earlier run")
    return contents(tmp_path / "out")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def failure(options: dict[str, Any]) -> str:
    """Return why a run fails."""
    config = TrainConfig.from_flat(**options)
    with pytest.raises(AgreedFailure) as failed:
        alone(lambda rank: train_model(config, rank))
    return str(failed.value)


def test_a_loss_that_is_not_finite_names_its_micro_batch(options: dict[str, Any]) -> None:
    text = failure(options | {"learning_rate": 1e30, "optimizer": "sgd"})
    assert re.search(r"step \d: the loss of micro-batch \d is (nan|inf) on rank 0", text)


def test_a_run_that_skips_most_of_its_updates_fails_and_saves_nothing(
    options: dict[str, Any],
    earlier: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its first update makes weights of 1e30, with which no other can be made."""
    options |= {"learning_rate": 1e30, "on_nan": "skip", "iters": 50}
    text = failure(options | {"save_every": 1, "checkpoint_every": 1})
    assert "step 7: " in text
    assert text.endswith(
        "6 of the last 7 updates were skipped: nothing more is saved, what was in "
        f"{tmp_path}/out stays; {TAMER}"
    )
    printed = capsys.readouterr().out
    assert "warning: step 1: with its weights the loss of the last batch is not" in printed
    assert "warning: step 3: 2 of the last 3 updates were skipped: nothing is saved" in printed
    assert contents(tmp_path / "out") == earlier
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_weights_that_are_not_finite_replace_nothing(
    options: dict[str, Any], earlier: dict[str, bytes], tmp_path: Path
) -> None:
    """Of the last update there is no next step that would show it."""
    text = failure(options | {"learning_rate": 3e38, "iters": 1})
    assert re.search(
        r"step 1: the weight model\.layers\.\d\.\S+ is not finite on rank 0 on \S+, stage 0: "
        rf"nothing more is saved, what was in \S+/out stays; {TAMER}$",
        text,
    )
    assert contents(tmp_path / "out") == earlier


def test_weights_that_give_no_finite_loss_replace_nothing_where_steps_may_be_skipped(
    options: dict[str, Any], earlier: dict[str, bytes], tmp_path: Path
) -> None:
    """One of two updates was made, and no weight is infinite."""
    text = failure(options | {"learning_rate": 1e30, "on_nan": "skip", "iters": 2})
    assert "step 2: with its weights the loss of the last batch is not finite: " in text
    assert contents(tmp_path / "out") == earlier
