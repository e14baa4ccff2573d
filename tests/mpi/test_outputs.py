"""What a run writes: adapters and models that mlx-lm loads, metrics, a trace, and the terminal."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from mlx_lm.tuner.trainer import evaluate

from testbed.jobs import ROOT, Job
from testbed.runs import events, in_file
from tests.helpers.models_and_batches import load_arrays, load_weights
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
def others(lora: Job, small: Path, small_tied: Path, pirate: Path, directory: Path) -> None:
    """Full fine-tunes, and runs that start from what others left, on two stages."""
    for name in ("full", "tied"):
        (directory / name).mkdir()
        (directory / name / "notes.txt").write_text("mine")
    full: Arguments = ["--data", pirate, *TRAIN, "--fine-tune-type", "full"]
    everything = in_file(directory / "everything.yaml", unfreeze_all=True)
    still: Arguments = [
        "--data",
        pirate,
        *OPTIONS,
        "--train",
        "--iters",
        "1",
        "--learning-rate",
        "1e-8",
    ]
    runs: dict[str, Arguments] = {
        "full": ["--model", small, *full],
        "tied": ["--model", small_tied, *full, *everything, "--schedule", "zb-v"],
        "resumed": ["--model", small, *still, "--resume-adapter-file", "lora/adapters.safetensors"],
        "continued": ["--model", directory / "full", *still],
    }
    for name, run in runs.items():
        files: Arguments = ["--adapter-path", directory / name, "--metrics-file", f"{name}.jsonl"]
        train_well(2, *run, *files, cwd=directory)


def final_loss(directory: Path, name: str) -> float:
    (event,) = events(directory / f"{name}.jsonl", "test")
    loss: float = event["loss"]
    return loss


def loss_in_mlx_lm(model: Path, adapters: Path | None, data: Path) -> float:
    """Of the test set, as mlx-lm loads the model and computes it in one process."""
    loaded, tokenizer = load(str(model), adapter_path=adapters and str(adapters))
    options = SimpleNamespace(data=str(data), train=False, test=True)
    _, _, test = load_dataset(options, tokenizer)
    loss = evaluate(loaded, CacheDataset(test), batch_size=4, num_batches=-1, max_seq_length=64)
    return float(loss)


def test_adapters_have_the_names_and_files_of_mlx_lm(lora: Job, directory: Path) -> None:
    adapters = directory / "lora"
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
    lora: Job, small: Path, pirate: Path, directory: Path
) -> None:
    expected = final_loss(directory / "new", "lora")
    assert loss_in_mlx_lm(small, directory / "lora", pirate) == pytest.approx(expected, rel=1e-6)
    assert loss_in_mlx_lm(small, None, pirate) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("name", "start"), [("full", "small"), ("tied", "small_tied")])
def test_a_full_fine_tune_is_a_model_directory_for_mlx_lm(
    name: str,
    start: str,
    others: None,
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


def test_training_starts_from_adapters(others: None, directory: Path) -> None:
    before = final_loss(directory / "new", "lora")
    assert final_loss(directory, "resumed") == pytest.approx(before, rel=1e-5)


def test_training_starts_from_a_full_fine_tune(others: None, directory: Path) -> None:
    assert final_loss(directory, "continued") == pytest.approx(
        final_loss(directory, "full"), rel=1e-5
    )


def test_metrics_have_a_line_for_every_event(lora: Job, directory: Path) -> None:
    lines = [json.loads(line) for line in (directory / "new/lora.jsonl").read_text().splitlines()]
    steps = [(line["event"], line.get("step")) for line in lines]
    assert steps == [
        ("start", 0),
        ("val", 1),
        ("train", 2),
        ("val", 3),
        ("val", 4),
        ("train", 4),
        ("summary", None),
        ("test", None),
    ]


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


def test_a_training_line_has_the_fields_of_the_contract(lora: Job, directory: Path) -> None:
    lines = events(directory / "new/lora.jsonl", "train")
    fields = ["event", "step", "loss", "tokens", "tokens_per_second", "learning_rate", "grad_norm"]
    fields += ["step_seconds", "bubble", "shapes", "ranks"]
    of_rank = ["rank", "compute_seconds", "exposed_comm_seconds", "idle_seconds"]
    limits = events(directory / "new/lora.jsonl", "start")[-1]["memory_limits"]
    for line in lines:
        assert set(fields) <= line.keys()
        assert all(line[field] > 0 for field in ("loss", "tokens", "step_seconds", "grad_norm"))
        assert line["learning_rate"] == pytest.approx(1e-2)
        assert 0 <= line["bubble"] < 1
        assert [rank["rank"] for rank in line["ranks"]] == [0, 1]
        for rank, planned in zip(line["ranks"], limits, strict=True):
            assert set(of_rank) <= rank.keys()
            assert 0 < rank["peak_memory_bytes"] < 1.1 * planned["planned_peak_bytes"]
            assert 0 < rank["active_memory_bytes"] <= rank["peak_memory_bytes"]
            parts = [rank[part] for part in of_rank[1:]]
            assert min(parts) >= 0 < sum(parts)
    assert lines[0]["tokens"] != lines[1]["tokens"]


def test_the_page_of_the_metrics_names_their_fields(lora: Job, directory: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for event in ("start", "train", "val", "test", "summary"):
        line = events(directory / "new/lora.jsonl", event)[-1]
        (fields,) = re.findall(rf"^\| `{event}` \| [^|]* \| (.*) \|$", page, re.MULTILINE)
        assert line.keys() - {"event", "time"} == {*re.findall(r"`(\w+)`", fields)}, event


def test_the_summary_has_the_memory_of_every_rank_beside_its_plan_and_its_limits(
    lora: Job, directory: Path
) -> None:
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


def test_a_full_fine_tune_replaces_its_own_shards_and_nothing_else(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    output = tmp_path / "project"
    mine = [output / "models" / "precious.txt", output / "model_notes.md", tmp_path / "project.old"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    common: Arguments = ["--model", small, "--data", pirate, "--fine-tune-type", "full"]
    common += ["--num-layers", "1", "--iters", "1", "--batch-size", "2", "--val-batches", "0"]
    common += ["--adapter-path", output]
    train_well(2, *common)
    train_well(1, *common)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert [path.name for path in output.glob("*.safetensors")] == [
        "model-00001-of-00001.safetensors"
    ]
    assert not list(output.glob("partial-*"))
