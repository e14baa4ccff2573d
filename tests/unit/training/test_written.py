"""What a run writes: adapters and models that mlx-lm loads, and metrics.

What ranks write together is in ``tests/mpi/test_outputs.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.modelfiles.safetensors_header import INDEX_FILE
from shardmlx.training.command import train_model
from testbed.jobs import ROOT
from testbed.runs import events
from tests.helpers.local_transport import alone
from tests.helpers.mlx_lm_losses import loss_in_mlx_lm
from tests.helpers.models_and_batches import load_arrays

Options = dict[str, Any]

TESTED: Options = {"num_layers": -1, "batch_size": 4, "max_seq_length": 64}
TESTED |= {"train": True, "test": True, "test_batches": -1}
TRAINED: Options = {"iters": 4, "learning_rate": 1e-2, "save_every": 2}
TRAINED |= {"steps_per_report": 2, "steps_per_eval": 3, **TESTED}
STILL: Options = {"iters": 1, "learning_rate": 1e-8, **TESTED}
"""A run that tests what it starts from."""


class Runs:
    """Runs of one process, each in a directory of its own."""

    def __init__(self, directory: Path, data: Path) -> None:
        self._directory = directory
        self._data = data

    def train(self, name: str, model: Path, options: Options) -> None:
        place = {"adapter_path": str(self.output(name)), "metrics_file": str(self.metrics(name))}
        given = {"model": str(model), "data": str(self._data), **place}
        config = TrainConfig.from_flat(**options, **given)
        alone(lambda rank: train_model(config, rank))

    def output(self, name: str) -> Path:
        return self._directory / name

    def metrics(self, name: str) -> Path:
        return self._directory / f"new-{name}" / "metrics.jsonl"

    def final_loss(self, name: str) -> float:
        (event,) = events(self.metrics(name), "test")
        loss: float = event["loss"]
        return loss


@pytest.fixture(scope="module")
def runs(pirate: Path, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With a run with adapters in it."""
    runs = Runs(tmp_path_factory.mktemp("written"), pirate)
    runs.train("lora", small, TRAINED)
    return runs


def test_adapters_have_the_names_and_files_of_mlx_lm(runs: Runs) -> None:
    adapters = runs.output("lora")
    assert sorted(path.name for path in adapters.iterdir()) == [
        "0000002_adapters.safetensors",
        "0000004_adapters.safetensors",
        "adapter_config.json",
        "adapters.safetensors",
    ]
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["num_layers"] == -1
    assert config["lora_parameters"] == {"rank": 8, "dropout": 0.0, "scale": 20.0}
    last, copy = (adapters / f"{name}adapters.safetensors" for name in ("", "0000004_"))
    assert last.read_bytes() == copy.read_bytes()
    assert {int(name.split(".")[2]) for name in load_arrays(last)} == set(range(5))


def test_adapters_load_in_mlx_lm_with_the_loss_at_the_end_of_training(
    runs: Runs, small: Path, pirate: Path
) -> None:
    expected = runs.final_loss("lora")
    assert loss_in_mlx_lm(small, runs.output("lora"), pirate) == pytest.approx(expected, rel=1e-6)
    assert loss_in_mlx_lm(small, None, pirate) != pytest.approx(expected, rel=1e-3)


def test_training_starts_from_adapters(runs: Runs, small: Path) -> None:
    start = str(runs.output("lora") / "adapters.safetensors")
    runs.train("resumed", small, STILL | {"resume_adapter_file": start})
    assert runs.final_loss("resumed") == pytest.approx(runs.final_loss("lora"), rel=1e-5)


def test_training_starts_from_a_full_fine_tune_which_mlx_lm_loads(
    runs: Runs, small: Path, pirate: Path
) -> None:
    runs.train("full", small, TRAINED | {"fine_tune_type": "full"})
    expected = runs.final_loss("full")
    assert loss_in_mlx_lm(runs.output("full"), None, pirate) == pytest.approx(expected, rel=1e-6)
    runs.train("continued", runs.output("full"), STILL)
    assert runs.final_loss("continued") == pytest.approx(expected, rel=1e-5)


def test_metrics_have_a_line_for_every_event(runs: Runs) -> None:
    lines = [json.loads(line) for line in runs.metrics("lora").read_text().splitlines()]
    assert [(line["event"], line.get("step")) for line in lines] == [
        ("start", 0),
        ("val", 1),
        ("train", 2),
        ("val", 3),
        ("val", 4),
        ("train", 4),
        ("summary", None),
        ("test", None),
    ]


def test_the_page_of_the_metrics_names_their_fields(runs: Runs) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for event in ("start", "train", "val", "test", "summary"):
        line = events(runs.metrics("lora"), event)[-1]
        (fields,) = re.findall(rf"^\| `{event}` \| [^|]* \| (.*) \|$", page, re.MULTILINE)
        assert line.keys() - {"event", "time"} == {*re.findall(r"`(\w+)`", fields)}, event


def test_a_full_fine_tune_replaces_its_own_shards_and_nothing_else(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    output = tmp_path / "project"
    mine = [output / "models" / "precious.txt", output / "model_notes.md", tmp_path / "project.old"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    # As a run on two stages leaves them.
    shards = [output / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for path in shards:
        path.write_bytes(b"of an earlier run")
    index = {"weight_map": {path.stem: path.name for path in shards}}
    (output / INDEX_FILE).write_text(json.dumps(index))
    runs = Runs(tmp_path, pirate)
    how = {"fine_tune_type": "full", "num_layers": 1, "iters": 1, "batch_size": 2, "val_batches": 0}
    runs.train("project", small, how)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert [path.name for path in output.glob("*.safetensors")] == [
        "model-00001-of-00001.safetensors"
    ]
    assert not list(output.glob("partial-*"))


def test_float32_copies_begin_with_what_the_model_has_in_float32(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "checkpoints"
    how: Options = {"fine_tune_type": "full", "unfreeze_all": True, "optimizer": "adamw"}
    how |= {"dtype": "bfloat16", "master_weights": True, "num_layers": -1, "batch_size": 4}
    how |= {"iters": 3, "learning_rate": 1e-7, "val_batches": 0, "checkpoint_dir": str(kept)}
    runs = Runs(tmp_path, pirate)
    runs.train("slow", small, how)
    state = load_arrays(*kept.glob("step-0000003/optimizer-*.safetensors"))
    copies = {
        name.removesuffix(".master"): array
        for name, array in state.items()
        if name.endswith(".master")
    }
    stored = load_arrays(*small.glob("*.safetensors"))
    written = load_arrays(*runs.output("slow").glob("*.safetensors"))
    assert written.keys() == copies.keys() == stored.keys()
    for name, array in stored.items():
        assert copies[name].dtype == array.dtype == mx.float32
        assert mx.allclose(copies[name], array, rtol=0, atol=2e-6).item(), "three steps of 1e-7"
