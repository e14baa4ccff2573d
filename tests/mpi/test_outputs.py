"""What ranks write together: whole models, their lines of the metrics, a trace, and the terminal.

Adapters and metrics of one process are in ``tests/unit/training/test_written.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from testbed.jobs import Job
from testbed.runs import events, in_file
from tests.helpers.mlx_lm_losses import loss_in_mlx_lm
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import train_well
from tests.helpers.shown import lacking

Arguments = list[str | Path]

OPTIONS = ["--num-layers", "-1", "--batch-size", "4", "--max-seq-length", "64"]
OPTIONS += ["--test", "--test-batches", "-1"]
TRAIN = ["--train", "--iters", "4", "--learning-rate", "1e-2", "--save-every", "2"]
TRAIN += ["--steps-per-report", "2", "--steps-per-eval", "3", *OPTIONS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def lora(small: Path, pirate: Path, directory: Path) -> Job:
    """A run with adapters on two stages; it wrote into ``directory``."""
    files = ["--adapter-path", "lora", "--metrics-file", "new/lora.jsonl", "--trace", "new/t.json"]
    return train_well(2, "--model", small, "--data", pirate, *TRAIN, *files, cwd=directory)


@pytest.fixture(scope="module")
def whole(small: Path, small_tied: Path, pirate: Path, directory: Path) -> None:
    """Full fine-tunes on two stages."""
    full: Arguments = ["--data", pirate, *TRAIN, "--fine-tune-type", "full"]
    everything = in_file(directory / "everything.yaml", unfreeze_all=True)
    runs: dict[str, Arguments] = {
        "full": ["--model", small, *full],
        "tied": ["--model", small_tied, *full, *everything, "--schedule", "zb-v"],
    }
    for name, run in runs.items():
        (directory / name).mkdir()
        (directory / name / "notes.txt").write_text("mine")
        files: Arguments = ["--adapter-path", directory / name, "--metrics-file", f"{name}.jsonl"]
        train_well(2, *run, *files, cwd=directory)


def final_loss(directory: Path, name: str) -> float:
    (event,) = events(directory / f"{name}.jsonl", "test")
    loss: float = event["loss"]
    return loss


@pytest.mark.parametrize(("name", "start"), [("full", "small"), ("tied", "small_tied")])
def test_a_full_fine_tune_is_a_model_directory_for_mlx_lm(
    name: str,
    start: str,
    whole: None,
    pirate: Path,
    directory: Path,
    request: pytest.FixtureRequest,
) -> None:
    source: Path = request.getfixturevalue(start)
    assert sorted(path.name for path in (directory / name).iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "notes.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    loss = loss_in_mlx_lm(directory / name, None, pirate)
    assert loss == pytest.approx(final_loss(directory, name), rel=1e-6)
    before, after = load_weights(source), load_weights(directory / name)
    assert after.keys() == before.keys()
    changed = {key for key in before if not np.array_equal(before[key], after[key])}
    # mlx-lm's "full" trains the decoder layers.
    layers = {key for key in before if key.startswith("model.layers.")}
    assert changed == (before.keys() if name == "tied" else layers)


def test_the_first_line_says_what_runs(lora: Job, directory: Path) -> None:
    (start,) = events(directory / "new/lora.jsonl", "start")
    assert start["options"]["learning_rate"] == 1e-2
    assert "learning_rate" in start["changed"]
    assert start["chosen"]["pipeline_stages"] == 2
    assert not set(start["chosen"]) & set(start["changed"])
    assert "optimizer" not in start["changed"]
    assert (start["iters"], start["sizes"]) == (4, {"train": 32, "valid": 16, "test": 14})
    layout = start["layout"]
    assert (layout["data_parallel"], layout["pipeline_parallel"]) == (1, 2)
    assert [each["rank"] for each in layout["ranks"]] == [0, 1]
    assert sum(each["num_layers"] for each in layout["stages"]) == 5
    first, last = layout["stages"]
    assert first["has_embedding"]
    assert last["has_lm_head"]
    assert last["is_trained"]
    schedule = start["schedule"]
    for spans in schedule["spans"]:
        assert all(0 <= begin <= end <= 1 for _, begin, end in spans)
        forward = [action for action, _, _ in spans if "F" in action]
        assert len(forward) == schedule["microbatches"]
    # Without times of the machines nothing is predicted in seconds.
    assert start["predicted"]["data"]["step_seconds"] is None
    assert len(start["memory_limits"]) == 2


def test_each_rank_has_its_times_and_its_memory_beside_its_plan_and_its_limits(
    lora: Job, directory: Path
) -> None:
    lines = events(directory / "new/lora.jsonl", "train")
    fields = ["event", "step", "loss", "tokens", "tokens_per_second", "learning_rate", "grad_norm"]
    fields += ["step_seconds", "bubble", "shapes", "ranks"]
    of_rank = ["rank", "compute_seconds", "exposed_comm_seconds", "idle_seconds"]
    plans = events(directory / "new/lora.jsonl", "start")[-1]["memory_limits"]
    for line in lines:
        assert set(fields) <= line.keys()
        assert all(line[field] > 0 for field in ("loss", "tokens", "step_seconds", "grad_norm"))
        assert line["learning_rate"] == pytest.approx(1e-2)
        assert 0 <= line["bubble"] < 1
        assert [rank["rank"] for rank in line["ranks"]] == [0, 1]
        for rank, planned in zip(line["ranks"], plans, strict=True):
            assert set(of_rank) <= rank.keys()
            assert 0 < rank["peak_memory_bytes"] < 1.1 * planned["planned_peak_bytes"]
            assert 0 < rank["active_memory_bytes"] <= rank["peak_memory_bytes"]
            parts = [rank[part] for part in of_rank[1:]]
            assert min(parts) >= 0 < sum(parts)
    assert lines[0]["tokens"] != lines[1]["tokens"]
    (summary,) = events(directory / "new/lora.jsonl", "summary")
    for rank, limits in zip(summary["ranks"], summary["memory_limits"], strict=True):
        assert 0 < limits["planned_peak_bytes"] < limits["memory_limit_bytes"]
        assert rank["peak_memory_bytes"] < limits["memory_limit_bytes"]
        assert limits["wired_limit_bytes"] is None
        assert limits["reasons"]["memory"].startswith("75% of the machine's memory")


def test_the_trace_shows_every_action_of_every_rank(lora: Job, directory: Path) -> None:
    records = json.loads((directory / "new/t.json").read_text())["traceEvents"]
    names = {record["pid"]: record["args"]["name"] for record in records if record["ph"] == "M"}
    assert [name.split()[:2] for _, name in sorted(names.items())] == [["rank", "0"], ["rank", "1"]]
    spans = [record for record in records if record["ph"] == "X"]
    assert all(span["dur"] >= 0 for span in spans)
    for rank in (0, 1):
        computed = Counter(
            span["name"] for span in spans if span["pid"] == rank and span["cat"] == "compute"
        )
        for microbatch in range(4):
            # Forward also to validate. The gradient for the input goes out before the others.
            assert computed[f"{rank}F{microbatch}"] > 4
            assert computed[f"{rank}I{microbatch}"] == (4 if rank else 0)
            assert computed[f"{rank}W{microbatch}"] == 4
    steps = [span["name"] for span in spans if span["pid"] == 1 and span["cat"] == "step"]
    assert [name for name in steps if name.startswith("step")] == [
        f"step {i}" for i in (1, 2, 3, 4)
    ]


def test_only_rank_0_speaks_and_says_each_thing_once(lora: Job) -> None:
    assert lora.stderr == ""
    assert lacking("training.md", "run", lora.stdout) == set()
    assert lacking("README.md", "demo", lora.stdout) == set()
    lines = lora.stdout.splitlines()
    for start in ("BLAS: ", "Trainable parameters: ", "Data: ", "step 2: loss", "Saved to lora"):
        assert len([line for line in lines if line.startswith(start)]) == 1, start
    assert len(lines) == len(set(lines))
