"""One YAML file, given to ``mlx_lm.lora`` and to ranks of ``shardmlx.train``: the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mpi.mpirun import PROGRAMS, ROOT, train_well

TOLERANCE = 1e-4
"""Relative. Float32, in another order."""

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "two stages": (2, ["--schedule", "1f1b", "--micro-batch-size", "1"]),
    "two by two": (4, ["--pipeline-stages", "2", "--micro-batch-size", "1"]),
    "four ranks in a V": (4, ["--schedule", "zb-v", "--micro-batch-size", "1"]),
    "two ranks, interleaved": (2, ["--schedule", "interleaved-1f1b", "--micro-batch-size", "1"]),
    "two ranks, zero bubble": (2, ["--schedule", "zb-h1", "--micro-batch-size", "2"]),
    "two replicas": (2, ["--pipeline-stages", "1"]),
}
"""Ranks, and the flags that mlx_lm.lora does not have."""

COMMON: dict[str, Any] = {
    "train": True,
    "seed": 3,
    "batch_size": 4,
    "iters": 12,
    "steps_per_report": 1,
    "steps_per_eval": 5,
    "val_batches": 2,
    "save_every": 1000,
    "max_seq_length": 96,
}

LORA = {"rank": 4, "dropout": 0.0, "scale": 10.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {
        "fine_tune_type": "lora",
        "lora_parameters": LORA,
        "num_layers": -1,
        "optimizer": "adam",
        "mask_prompt": True,
        "lr_schedule": {
            "name": "cosine_decay",
            "arguments": [1e-2, 20, 1e-4],
            "warmup": 4,
            "warmup_init": 1e-5,
        },
        "test": True,
        "test_batches": 2,
    },
    "full": {
        "fine_tune_type": "full",
        "num_layers": 6,
        "optimizer": "adamw",
        "optimizer_config": {"adamw": {"weight_decay": 0.1}},
        "learning_rate": 1e-3,
        "grad_accumulation_steps": 2,
        "val_batches": -1,
        "test": True,
        "test_batches": -1,
    },
    "dora": {
        "fine_tune_type": "dora",
        "lora_parameters": LORA,
        "num_layers": 8,
        "optimizer": "sgd",
        "optimizer_config": {"sgd": {"momentum": 0.9}},
        "learning_rate": 1e-2,
    },
    "lora of the last layers": {
        "fine_tune_type": "lora",
        "lora_parameters": LORA | {"keys": ["self_attn.q_proj", "mlp.down_proj"]},
        "num_layers": 3,
        "optimizer": "adafactor",
        "lr_schedule": {"name": "linear_schedule", "arguments": [1e-2, 1e-3, 10], "warmup": 3},
        "grad_accumulation_steps": 2,
    },
    "full with muon": {
        "fine_tune_type": "full",
        "num_layers": -1,
        "optimizer": "muon",
        "learning_rate": 1e-3,
        "lora_parameters": None,
    },
    "new adapters": {
        "fine_tune_type": "dora",
        "lora_parameters": LORA,
        "num_layers": 5,
        "optimizer": "sgd",
        "learning_rate": 1e-30,
        "iters": 1,
    },
}

RUNS = [
    ("lora", "two stages"),
    ("lora", "two by two"),
    ("lora", "four ranks in a V"),
    ("full", "two stages"),
    ("full", "two by two"),
    ("full", "four ranks in a V"),
    ("dora", "two ranks, zero bubble"),
    ("lora of the last layers", "two by two"),
    ("full with muon", "two ranks, interleaved"),
    ("new adapters", "two replicas"),
]


@pytest.fixture(scope="module")
def files(mistral: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The YAML file of each configuration."""
    directory = tmp_path_factory.mktemp("configs")
    paths = {name: directory / f"{name.replace(' ', '-')}.yaml" for name in CONFIGS}
    for name, path in paths.items():
        adapters = str(directory / f"adapters-{path.stem}")
        files = {"model": str(mistral), "data": str(pirate), "adapter_path": adapters}
        path.write_text(yaml.safe_dump(COMMON | CONFIGS[name] | files))
    return paths


Losses = dict[str, Any]


@pytest.fixture(scope="module")
def reference(files: dict[str, Path]) -> dict[str, Losses]:
    """The losses that mlx_lm.lora has with each configuration."""
    run = subprocess.run(
        [sys.executable, PROGRAMS / "mlx_lm_lora.py", *files.values()],
        # Compiling takes longer than running a dozen small steps, and changes no result.
        env=dict(os.environ) | {"MLX_DISABLE_COMPILE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return {name: json.loads(path.with_suffix(".json").read_text()) for name, path in files.items()}


@pytest.fixture(scope="module")
def ours(
    files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Losses, Path]]:
    """Runs a configuration in a layout: its losses, and its adapter path."""

    def run(config: str, layout: str) -> tuple[Losses, Path]:
        ranks, flags = LAYOUTS[layout]
        directory = tmp_path_factory.mktemp("run")
        metrics, adapters = directory / "metrics.jsonl", directory / "adapters"
        output = ["--adapter-path", str(adapters), "--metrics-file", str(metrics)]
        train_well(ranks, "-c", files[config], *output, *flags)
        losses: Losses = {"train": [], "val": [], "learning_rate": [], "test": None}
        for line in metrics.read_text().splitlines():
            event = json.loads(line)
            if event["event"] in ("train", "val"):
                losses[event["event"]].append([event["step"], event["loss"]])
            if event["event"] == "train":
                losses["learning_rate"].append(event["learning_rate"])
            if event["event"] == "test":
                losses["test"] = event["loss"]
        return losses, adapters

    return run


@pytest.mark.parametrize(("config", "layout"), RUNS)
def test_losses_and_weights_are_those_of_mlx_lm(
    config: str,
    layout: str,
    reference: dict[str, Losses],
    ours: Callable[[str, str], tuple[Losses, Path]],
    files: dict[str, Path],
) -> None:
    theirs = reference[config]
    losses, _ = ours(config, layout)
    for name in ("train", "val"):
        assert [step for step, _ in losses[name]] == [step for step, _ in theirs[name]]
        assert [loss for _, loss in losses[name]] == pytest.approx(
            [loss for _, loss in theirs[name]], rel=TOLERANCE
        )
    assert losses["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-6)
    assert losses["test"] == pytest.approx(theirs["test"], rel=TOLERANCE)
