"""Attention and loss in pieces leave the losses of a run as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.training.command import train_model
from testbed.rows import write
from tests.helpers.local_transport import alone

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

WHOLE = {"attention_chunk": "off", "loss_chunk": "off", "recompute": "none"}
PIECES = {"attention_chunk": "auto", "loss_chunk": "counted", "recompute": "selective"}


def losses(**options: Any) -> dict[str, list[float]]:
    """Return the losses of training and of validation."""
    found: dict[str, list[float]] = {"train": [], "val": []}

    def listen(event: str, values: Mapping[str, Any]) -> None:
        if event in found:
            found[event].append(values["loss"])

    config = TrainConfig.from_flat(**options)
    alone(lambda rank: train_model(config, rank, on_event=listen))
    return found


def test_the_loss_curve_is_that_without_pieces(small: Path, tmp_path: Path) -> None:
    """Of packed sequences that are longer than a piece of attention."""
    rows = [{"text": " ".join(["The ship sails on"] * count)} for count in (15, 20, 17, 12)]
    data = write(tmp_path / "texts", train=rows, valid=rows)
    place = {"model": str(small), "data": data, "adapter_path": str(tmp_path / "out")}
    options: dict[str, Any] = {"iters": 2, "batch_size": 4, "micro_batch_size": 2, **place}
    options |= {"num_layers": -1, "learning_rate": 1e-3, "steps_per_report": 1, "pack": True}
    options |= {"val_batches": 1, "schedule": "1f1b"}
    whole = losses(**options, **WHOLE)
    pieces = losses(**options, **PIECES)
    assert len(whole["train"]) == len(whole["val"]) == 2
    assert pieces["train"] == pytest.approx(whole["train"], rel=1e-5)
    assert pieces["train"][0] == pytest.approx(whole["train"][0], rel=1e-6)
    assert pieces["val"] == pytest.approx(whole["val"], rel=1e-5)
