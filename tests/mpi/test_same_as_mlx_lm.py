"""One YAML file, given to ``mlx_lm.lora`` and to ranks of ``shardmlx.train``: the same losses.

That new adapters are mlx-lm's to the bit is in ``tests/unit/loading/test_build.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from testbed.jobs import PYTHONPATH
from testbed.runs import events
from testbed.small_models import small_directory, undeclared_directory
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import train_well

TOLERANCE = 1e-5
"""Relative, for sums in float32 in another order. Large learning rates would not do: mlx-lm itself
then leaves its own curve when the weights change in the seventh digit."""

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "two ranks, as it chooses": (2, []),
    "two stages": (2, ["--schedule", "1f1b", "--no-pack", "--micro-batch-size", "1"]),
    "two by two": (4, ["--pipeline-stages", "2", "--micro-batch-size", "1"]),
    "four stages": (4, ["--schedule", "gpipe", "--micro-batch-size", "2"]),
    "four ranks in a V": (4, ["--schedule", "zb-v", "--no-pack", "--micro-batch-size", "1"]),
    "two ranks, interleaved": (2, ["--schedule", "interleaved-1f1b", "--micro-batch-size", "1"]),
    "two ranks, zero bubble": (2, ["--schedule", "zb-h1", "--micro-batch-size", "2"]),
    "two stages, packed": (2, ["--pack", "--micro-batch-size", "2"]),
    "two by two, packed": (4, ["--pipeline-stages", "2", "--pack"]),
}
"""Ranks, and the flags that mlx_lm.lora does not have."""

COMMON: dict[str, Any] = {
    "train": True,
    "seed": 3,
    "batch_size": 4,
    "iters": 4,
    "steps_per_report": 1,
    "steps_per_eval": 2,
    "val_batches": 2,
    "save_every": 1000,
    "max_seq_length": 64,
}

TESTED = "testing alone"

MODELS = {"lora": "eight_layers", TESTED: "eight_layers", "lora, Mistral's tokenizer": "mistral"}
"""The model of a configuration, where it is not ``small``. Four ranks in a V need eight layers.
Mistral's tokenizer has 32 768 tokens: the head is most of the work of so small a model."""

ADAPTERS = {TESTED: "lora"}
"""The configuration that makes the adapters of another one."""

LORA = {"rank": 4, "dropout": 0.0, "scale": 10.0}

CHAT: dict[str, Any] = {
    "fine_tune_type": "lora",
    "lora_parameters": LORA,
    "num_layers": -1,
    "optimizer": "adam",
    "mask_prompt": True,
    "lr_schedule": {
        "name": "cosine_decay",
        "arguments": [2e-3, 20, 1e-4],
        "warmup": 2,
        "warmup_init": 1e-5,
    },
    "test": True,
    "test_batches": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "lora": CHAT,
    "lora, Mistral's tokenizer": {**CHAT, "iters": 2, "val_batches": 1, "test_batches": 1},
    TESTED: {**CHAT, "train": False, "test_batches": -1},
    "full": {
        "fine_tune_type": "full",
        "num_layers": 4,
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
        "num_layers": 5,
        "optimizer": "sgd",
        "optimizer_config": {"sgd": {"momentum": 0.9}},
        "learning_rate": 1e-2,
    },
    "lora of the last layers": {
        "fine_tune_type": "lora",
        "lora_parameters": LORA | {"keys": ["self_attn.q_proj", "mlp.down_proj"]},
        "num_layers": 3,
        "optimizer": "adafactor",
        "lr_schedule": {"name": "linear_schedule", "arguments": [1e-2, 1e-3, 10], "warmup": 1},
        "grad_accumulation_steps": 2,
    },
    "full with muon": {
        "fine_tune_type": "full",
        "num_layers": -1,
        "optimizer": "muon",
        "learning_rate": 1e-3,
        "lora_parameters": None,
    },
}

HYBRID: dict[str, Any] = {
    "iters": 3,
    "fine_tune_type": "lora",
    "lora_parameters": LORA,
    "num_layers": -1,
    "learning_rate": 1e-3,
    "max_seq_length": 128,
}
UNDECLARED = {
    "qwen3_5": HYBRID,
    "granitemoehybrid": {**HYBRID, "fine_tune_type": "full"},
}
"""Models of no declared family, whose layers keep a state, with a sequence longer than a piece.
Layers that share keys and values are in ``tests/unit/models/test_carried.py``."""

CONFIGS |= UNDECLARED

RUNS = [
    ("lora, Mistral's tokenizer", "two ranks, as it chooses"),
    ("lora", "four ranks in a V"),
    ("lora", "two stages, packed"),
    ("full", "two by two, packed"),
    ("dora", "two ranks, zero bubble"),
    ("lora of the last layers", "four stages"),
    ("full with muon", "two ranks, interleaved"),
    ("qwen3_5", "two stages"),
    ("granitemoehybrid", "two by two"),
]


Losses = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run left behind: losses by step, and where the weights are."""

    losses: Losses
    output: Path

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return load_weights(self.output)


def run_mlx_lm(configs: Iterable[Path]) -> list[Run]:
    """``mlx_lm.lora -c CONFIG`` for each file, in one process after the other."""
    configs = list(configs)
    run = subprocess.run(
        [sys.executable, "-m", "testbed.mlx_lm_lora", *configs],
        # Compiling takes longer than running a dozen small steps, and changes no result.
        env=dict(os.environ) | {"MLX_DISABLE_COMPILE": "1", "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [
        Run(
            json.loads(config.with_suffix(".json").read_text()),
            Path(yaml.safe_load(config.read_text())["adapter_path"]),
        )
        for config in configs
    ]


def run_shardmlx(config: Path, layout: str, output: Path, *flags: str) -> Run:
    """``mpirun python -m shardmlx.train -c CONFIG``: the same file, with flags for what is ours."""
    ranks, ours = LAYOUTS[layout]
    metrics = output.with_suffix(".jsonl")
    where: list[str | Path] = ["--adapter-path", output, "--metrics-file", metrics]
    train_well(ranks, "-c", config, *where, *ours, *flags)
    trained, tests = events(metrics, "train"), events(metrics, "test")
    losses: Losses = {
        "train": [(event["step"], event["loss"]) for event in trained],
        "val": [(event["step"], event["loss"]) for event in events(metrics, "val")],
        "learning_rate": [event["learning_rate"] for event in trained],
        "test": tests[0]["loss"] if tests else None,
    }
    return Run(losses, output)


@pytest.fixture(scope="module")
def models(
    mistral: Path, small: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    eight_layers = tmp_path_factory.mktemp("eight") / "model"
    small_directory(eight_layers, small_tokenizer, num_hidden_layers=8)
    # Its own prompt ends in a space, which may be one token with an answer: mlx-lm masks it then.
    settings = eight_layers / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("'a: '", "'a:'"))
    paths = {"mistral": mistral, "small": small, "eight_layers": eight_layers}
    for name in UNDECLARED:
        paths[name] = eight_layers.parent / name
        undeclared_directory(paths[name], small_tokenizer, name)
    return {name: paths[MODELS.get(name, name if name in paths else "small")] for name in CONFIGS}


@pytest.fixture(scope="module")
def files(
    models: dict[str, Path], pirate: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("configs")
    paths = {name: directory / f"{name.replace(' ', '-')}.yaml" for name in CONFIGS}
    for name, path in paths.items():
        adapters = paths[ADAPTERS.get(name, name)].with_suffix("")
        where = {"model": models[name], "data": pirate, "adapter_path": adapters}
        content = COMMON | CONFIGS[name] | {key: str(value) for key, value in where.items()}
        path.write_text(yaml.safe_dump(content))
    return paths


@pytest.fixture(scope="module")
def theirs(files: dict[str, Path]) -> dict[str, Run]:
    return dict(zip(files, run_mlx_lm(files.values()), strict=True))


@pytest.fixture(scope="module")
def ours(
    files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Run]:
    directory = tmp_path_factory.mktemp("runs")

    @cache
    def run(config: str, layout: str) -> Run:
        return run_shardmlx(files[config], layout, directory / f"{config} in {layout}")

    return run


@pytest.mark.parametrize(("config", "layout"), RUNS)
def test_losses_and_weights_are_those_of_mlx_lm(
    config: str,
    layout: str,
    theirs: dict[str, Run],
    ours: Callable[[str, str], Run],
    models: dict[str, Path],
) -> None:
    expected, run = theirs[config], ours(config, layout)
    for name in ("train", "val"):
        steps, losses = zip(*run.losses[name], strict=True)
        expected_steps, expected_losses = zip(*expected.losses[name], strict=True)
        assert steps == expected_steps
        assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert run.losses["learning_rate"] == pytest.approx(expected.losses["learning_rate"], rel=1e-6)
    if expected.losses["test"] is not None:
        assert run.losses["test"] == pytest.approx(expected.losses["test"], rel=TOLERANCE)

    # mlx-lm saves of a full fine-tune what was trained, we the whole model.
    full = CONFIGS[config]["fine_tune_type"] == "full"
    before = load_weights(models[config]) if full else {}
    assert run.weights.keys() == (before | expected.weights).keys()
    for name, array in (before | expected.weights).items():
        change = np.linalg.norm(array - before.get(name, 0))
        assert np.linalg.norm(run.weights[name] - array) <= 1e-3 * change, name


def test_testing_alone_has_the_loss_of_mlx_lm(
    files: dict[str, Path], theirs: dict[str, Run]
) -> None:
    """With the adapters that mlx-lm has made."""
    expected = theirs[TESTED]
    before = {path.name: path.read_bytes() for path in expected.output.iterdir()}
    run = run_shardmlx(files[TESTED], "two by two", expected.output)
    assert run.losses["train"] == run.losses["val"] == []
    assert run.losses["test"] == pytest.approx(expected.losses["test"], rel=TOLERANCE)
    assert before == {path.name: path.read_bytes() for path in expected.output.iterdir()}
