"""A run has the same losses and ends with the same weights in whatever layout it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from testbed.runs import events
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import train_well

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "two stages": (2, ["--schedule", "1f1b"]),
    "two by two": (4, ["--schedule", "zb-v", "--pipeline-stages", "2"]),
}

COMMON: dict[str, Any] = {
    "seed": 5,
    "batch_size": 4,
    "micro_batch_size": 1,
    "iters": 4,
    "learning_rate": 1e-3,
    "num_layers": -1,
    "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 10.0},
    "max_seq_length": 64,
    "steps_per_report": 1,
    "steps_per_eval": 3,
    "val_batches": 1,
    "pack": False,
    "grad_checkpoint": False,
}

LIMIT, STEP = 0.2, 0.5
CLIPPED = {
    "fine_tune_type": "full",
    "unfreeze_all": True,
    "max_grad_norm": LIMIT,
    "optimizer": "sgd",
    "learning_rate": STEP,
    "iters": 1,
}


@dataclass(frozen=True)
class Variant:
    """``exact``: one replica has the very bits of one rank; no sum is made in another order."""

    options: dict[str, Any]
    model: str = "small"
    exact: bool = False


VARIANTS: dict[str, Variant] = {
    "lora": Variant({}, exact=True),
    "dropout": Variant({"lora_parameters": {"rank": 4, "dropout": 0.3, "scale": 10.0}}, exact=True),
    "quantised": Variant({}, "small_quantised", exact=True),
    "bfloat16": Variant({"dtype": "bfloat16"}, exact=True),
    "one clipped step": Variant(CLIPPED, "small_tied"),
}
"""Accumulated gradients of a tied model that is trained whole are in test_resume.py."""

ON_FOUR = {"dropout", "one clipped step"}
"""Run on four ranks too: they show what replicas change."""

RUNS = [
    (name, layout)
    for layout in LAYOUTS
    for name in VARIANTS
    if LAYOUTS[layout][0] < 4 or name in ON_FOUR
]


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    metrics: Path
    output: Path

    def losses(self) -> list[float]:
        """Of training, then of validation."""
        return [event["loss"] for name in ("train", "val") for event in events(self.metrics, name)]

    def norms(self) -> list[float]:
        """Null before the first update."""
        return [event["grad_norm"] or 0.0 for event in events(self.metrics, "train")]

    def weights(self) -> dict[str, np.ndarray]:
        return load_weights(self.output)


class Results(dict[tuple[str, str], Result]):
    """Of each variant in each layout, run when it is asked for."""

    def __init__(self, directory: Path, models: Mapping[str, Path], data: Path) -> None:
        super().__init__()
        self._directory, self._models, self._data = directory, models, data

    def __missing__(self, run: tuple[str, str]) -> Result:
        name, layout = run
        ranks, flags = LAYOUTS[layout]
        variant = VARIANTS[name]
        stem = f"{name} on {layout}"
        config = self._directory / f"{stem}.yaml"
        where = {"model": str(self._models[variant.model]), "data": str(self._data)}
        config.write_text(yaml.safe_dump(COMMON | variant.options | where))
        result = Result(self._directory / f"{stem}.jsonl", self._directory / stem)
        output: list[str | Path] = ["--adapter-path", result.output]
        train_well(ranks, "-c", config, "--metrics-file", result.metrics, *output, *flags)
        self[run] = result
        return result


@pytest.fixture(scope="module")
def results(
    small: Path,
    small_tied: Path,
    small_quantised: Path,
    pirate: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    models = {"small": small, "small_tied": small_tied, "small_quantised": small_quantised}
    return Results(tmp_path_factory.mktemp("layouts"), models, pirate)


def distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Euclidean, between the weights that both have."""
    return float(np.sqrt(sum(np.square(a[name] - b[name]).sum() for name in a.keys() & b.keys())))


def length(weights: Mapping[str, np.ndarray]) -> float:
    return distance(weights, {name: np.zeros_like(array) for name, array in weights.items()})


@pytest.mark.parametrize(("name", "layout"), [run for run in RUNS if run[1] != "one rank"])
def test_losses_and_weights_are_those_of_one_rank(name: str, layout: str, results: Results) -> None:
    expected, result = results[name, "one rank"], results[name, layout]
    weights, expected_weights = result.weights(), expected.weights()
    assert weights.keys() == expected_weights.keys()
    short = VARIANTS[name].options.get("dtype") == "bfloat16"
    if VARIANTS[name].exact and layout == "two stages":
        assert result.losses() == expected.losses()
        assert distance(weights, expected_weights) == 0.0
    else:
        assert result.losses() == pytest.approx(expected.losses(), rel=1e-2 if short else 1e-5)
        difference = distance(weights, expected_weights)
        assert difference <= (5e-2 if short else 1e-3) * length(expected_weights)
    assert result.norms() == pytest.approx(expected.norms(), rel=5e-2 if short else 1e-4)
    if name == "dropout":
        plain = results["lora", "one rank"].losses()
        assert expected.losses() != pytest.approx(plain, rel=1e-3), "it does something"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clipped_step_of_sgd_is_learning_rate_times_limit_long(
    layout: str, results: Results, small_tied: Path
) -> None:
    """Every weight counted once, the tied embedding of first and last stage too."""
    result = results["one clipped step", layout]
    assert result.norms()[0] > 2 * LIMIT
    moved = distance(result.weights(), load_weights(small_tied))
    assert moved == pytest.approx(STEP * LIMIT, rel=1e-3)
