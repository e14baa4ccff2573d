"""``--report-to``: a run that is logged by the libraries of all services, without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import REPORTERS
from testbed.jobs import Running, patience

READER = Path(__file__).parent / "programs/read_services.py"

# The finder of importlib.util would load those that mlx-lm's import has left for later.
pytestmark = pytest.mark.skipif(
    any(PathFinder.find_spec(service) is None for service in REPORTERS),
    reason="pip install -e .[services]",
)


def test_all_services_have_the_numbers_of_the_metrics_file_by_one_set_of_names(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    metrics = tmp_path / "metrics.jsonl"
    words: list[str | Path] = ["-m", "shardmlx.train", "--train", "--model", small]
    words += ["--data", pirate, "--num-layers", "-1", "--iters", "6", "--steps-per-report", "2"]
    words += ["--test", "--adapter-path", out, "--metrics-file", metrics]
    words += ["--report-to", ",".join(REPORTERS), "--project-name", "pirates"]
    env = {
        "SHARDMLX_TEST_ALL_LIBRARIES": "1",
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{out}/mlruns",
        "TRACKIO_DIR": str(out / "trackio"),
    }
    with Running.ranks(1, *words, env=env) as running:
        assert running.wait(patience(120.0)) == 0, running.job().output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    command = [sys.executable, str(READER), str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=True)
    found: dict[str, Any] = json.loads(printed.stdout)

    expected = numbers_of(lines)
    assert set(found) == set(REPORTERS)
    for service, kept in found.items():
        assert kept["iters"] == 6, service
        # swanlab begins so what it says of the machine, if a run is long.
        own = {name for name in kept["numbers"] if not name.startswith("__swanlab__.")}
        assert own == expected.keys(), service
        for name, values in expected.items():
            shown = {int(step): value for step, value in kept["numbers"][name].items()}
            assert shown == pytest.approx(values, rel=1e-6), (service, name)
    assert found["mlflow"] | {"numbers": 0} == {
        "numbers": 0,
        "iters": 6.0,
        "name": "out",
        "finished": True,
        "page": True,
    }
    assert (found["wandb"]["project"], found["wandb"]["page"]) == ("pirates", ["run.html"])
    assert found["trackio"]["project"] == "pirates"


def numbers_of(lines: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return what services show of a metrics file, by name and step."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        numbers: dict[str, float] = {}
        step = line.get("step", 6)
        if line["event"] == "train":
            same = ("learning_rate", "tokens", "trained_tokens", "tokens_per_second", "grad_norm")
            numbers = {name: line[name] for name in (*same, "skipped", "step_seconds", "bubble")}
            numbers["train_loss"] = line["loss"]
            numbers["iterations_per_second"] = 1 / line["step_seconds"]
            peaks = [each["peak_memory_bytes"] for each in line["ranks"]]
            numbers["peak_memory"] = max(peaks) / 1e9
        elif line["event"] == "val":
            numbers = {"val_loss": line["loss"], "val_time": line["seconds"]}
            step -= 1
        elif line["event"] == "test":
            numbers = {"test_loss": line["loss"], "test_perplexity": line["perplexity"]}
        for name, value in numbers.items():
            found.setdefault(name, {})[step] = value
    return found
