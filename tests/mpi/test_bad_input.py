"""Bad input ends on all ranks, in one line that names the value and the remedy, with status 2.

What the first rank finds in the data reaches all in one way: most of it is found by one rank here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.jobs import Job
from tests.helpers.mpirun import mpirun, train


@pytest.fixture
def model(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "model"))


@pytest.fixture
def data(pirate: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pirate, tmp_path / "data"))


def in_a_job_of_its_own(ranks: int, *arguments: str | Path) -> Job:
    return mpirun(ranks, "-m", "shardmlx.train", *arguments)


def refused(
    tmp_path: Path, ranks: int, *flags: str | Path, start: Callable[..., Job] = train
) -> str:
    """Return the one line with which a job must end; nothing else may be left of it."""
    output = tmp_path / "adapters"
    job = start(
        ranks,
        *("--model", tmp_path / "model", "--data", tmp_path / "data"),
        *("--adapter-path", output, "--iters", "1", "--batch-size", "2", "--num-layers", "-1"),
        *flags,
    )
    line = job.failure(2)
    assert "loaded in" not in job.output
    assert not output.exists()
    assert line.startswith("shardmlx: error: ")
    return line.removeprefix("shardmlx: error: ")


def test_a_stage_map_that_does_not_fit(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text("stages:\n  - num_layers: 2\n  - num_layers: 2\n")
    line = refused(tmp_path, 2, "--stage-map", path)
    assert str(path) in line
    assert "4 layers (2 + 2)" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--pipeline-stages", "1", "--batch-size", "3"), ("3", "2 replicas", "--replica-rows")),
        (("--num-layers", "6"), ("--num-layers 6", "5 layers", "-1")),
        (("--test",), ("--adapter-path", 'use --adapter-path ""')),
    ],
    ids=["batch", "layers", "no adapters"],
)
def test_options_that_do_not_fit_the_run(
    flags: tuple[str, ...], named: tuple[str, ...], model: Path, data: Path, tmp_path: Path
) -> None:
    line = refused(tmp_path, 2, *flags)
    assert [each for each in named if each not in line] == []


def test_packing_for_a_model_whose_positions_depend_on_the_length_of_the_row(
    model: Path, data: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    (model / "config.json").write_text(json.dumps(config))
    assert "--pack" in refused(tmp_path, 2, "--pack")


def test_a_line_that_is_not_json(model: Path, data: Path, tmp_path: Path) -> None:
    path = data / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], '{"messages": [', *lines[4:]]) + "\n")
    line = refused(tmp_path, 2, start=in_a_job_of_its_own)
    assert line.startswith(f"{path}:5 ")


def test_a_memory_limit_below_what_the_plan_needs(model: Path, data: Path, tmp_path: Path) -> None:
    line = refused(tmp_path, 2, "--memory-limit", "0.6MiB")
    assert re.match(r"rank \d \(\S+\) would take \S+ GiB, ", line)
    assert re.search(r"--memory-limit \d+MiB or more", line)


def without_config(model: Path) -> str:
    (model / "config.json").unlink()
    return "config.json"


def another_family(model: Path) -> str:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gpt2"}))
    return "mlx-lm cannot build this model"


def without_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    return f"{model} holds no tokenizer"


@pytest.mark.parametrize("spoil", [without_config, another_family, without_tokenizer])
def test_a_model_directory_that_is_not_whole(
    spoil: Callable[[Path], str], model: Path, data: Path, tmp_path: Path
) -> None:
    named = spoil(model)
    assert named in refused(tmp_path, 2)


@pytest.mark.parametrize("flag", ["--metrics-file", "--trace"])
def test_an_output_that_cannot_be_written(
    flag: str, model: Path, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model" / "config.json" / "output"
    assert f"{flag} {path}" in refused(tmp_path, 2, flag, path)


def test_a_file_in_the_place_of_a_model_directory(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    flags = ("--fine-tune-type", "full", "--adapter-path", path)
    assert f"--adapter-path {path}" in refused(tmp_path, 2, *flags)
    assert path.read_text() == "mine"


def test_metrics_of_the_last_run_stay(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    refused(tmp_path, 2, "--batch-size", "64", "--metrics-file", path)
    assert path.read_text() == "{}\n"


def test_a_full_fine_tune_in_the_place_of_the_model_it_starts_from(
    model: Path, data: Path, tmp_path: Path
) -> None:
    before = sorted(path.name for path in model.iterdir())
    line = refused(tmp_path, 2, "--fine-tune-type", "full", "--adapter-path", model)
    assert line.startswith(f"--adapter-path {model} is the model itself")
    assert sorted(path.name for path in model.iterdir()) == before
