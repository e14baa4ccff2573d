"""How a run goes on when hosts are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmlx.config.specs import RunSpec
from shardmlx.config.train import LINE
from shardmlx.costmodel.hostfile import Machine
from shardmlx.errors import UserError
from shardmlx.hosts.degraded_layout import DegradedLayout, plan_again
from shardmlx.partitioners import DoesNotFitError
from tests.helpers.models_and_batches import tiny_config

GIB = 1 << 30


def machines(count: int, **facts: float) -> list[Machine]:
    return [Machine(host=f"mac-{i}", **facts) for i in range(count)]  # type: ignore[arg-type]


def layout(hosts: list[Machine], *options: str) -> DegradedLayout:
    config = LINE.load(options)
    return plan_again(options, RunSpec.of(config), hosts, config.config)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Only the configuration of a small model of sixteen layers: enough to plan with."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps(tiny_config(layers=16) | {"torch_dtype": "float32"})
    )
    return str(directory)


@pytest.fixture
def stage_map(tmp_path: Path) -> str:
    file = tmp_path / "map.yaml"
    file.write_text("stages:\n- {num_layers: 8, host: mac-0}\n- {num_layers: 8, host: mac-1}\n")
    return str(file)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (3, "--batch-size 6"),
        (2, "--pipeline-stages 2"),
        (4, "--pipeline-stages 2"),
        (2, "--pipeline-stages 1 --batch-size 4"),
        (3, "--schedule zb-v"),
    ],
)
def test_what_still_fits_stays(count: int, options: str, model: str) -> None:
    words = ("--model", model, *options.split())
    assert layout(machines(count), *words) == DegradedLayout(
        count, words, f"layout for {count} ranks: as given"
    )


@pytest.mark.parametrize(
    ("count", "options", "left", "line"),
    [
        (
            3,
            "--pipeline-stages 4",
            "--pipeline-stages 3",
            "layout for 3 ranks: one pipeline of 3, instead of --pipeline-stages 4",
        ),
        (
            3,
            "--pipeline-stages 1 --batch-size 4",
            "--batch-size 4 --pipeline-stages 3",
            "layout for 3 ranks: one pipeline of 3, instead of --pipeline-stages 1",
        ),
        (
            10,
            "--pipeline-stages 3 --schedule zb-v --batch-size 3",
            "--schedule zb-v --batch-size 3 --pipeline-stages 8",
            "layout for 8 ranks, 2 unused: one pipeline of 8, instead of --pipeline-stages 3",
        ),
        (1, "--pipeline-stages=2", "--pipeline-stages 1", None),
    ],
)
def test_what_does_not_fit_becomes_one_pipeline(
    count: int, options: str, left: str, line: str | None, model: str
) -> None:
    found = layout(machines(count), "--model", model, *options.split())
    assert found.options == ("--model", model, *left.split())
    assert line is None or found.line == line


def test_more_ranks_than_layers_stay_unused(model: str) -> None:
    found = layout(machines(18), "--model", model)
    assert found == DegradedLayout(
        16, ("--model", model), "layout for 16 ranks, 2 unused: one pipeline of 16"
    )


def test_a_stage_map_stays_while_its_hosts_are_there(stage_map: str, model: str) -> None:
    words = ("--model", model, "--stage-map", stage_map)
    assert layout(machines(2), *words).options == words
    assert layout(machines(4), *words).options == words
    without_first = machines(3)[1:]
    found = layout(without_first, *words)
    assert found.options == ("--model", model)
    assert found.line == (
        f"layout for 2 ranks: one pipeline of 2, instead of stage map {stage_map}"
    )


def test_without_the_model_the_layout_is_still_found() -> None:
    found = layout(machines(3), "--model", "./nowhere", "--pipeline-stages", "4")
    assert found.options == ("--model", "./nowhere", "--pipeline-stages", "3")


def test_a_stage_map_in_the_file_cannot_be_taken_out(
    stage_map: str, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"stage_map: {stage_map}\nmodel: {model}\n")
    with pytest.raises(UserError) as error:
        layout(machines(1), "-c", str(file))
    assert str(error.value) == (
        f"{file}: stage_map does not suit the 1 rank left: give it by --stage-map, and launch can "
        "plan again without it"
    )


def test_pipeline_stages_in_the_file_are_overruled(model: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"pipeline_stages: 2\nmodel: {model}\n")
    assert layout(machines(3), "-c", str(file)).options == (
        *("-c", str(file)),
        *("--pipeline-stages", "3"),
    )


KNOWN = {"memory": 8 * GIB, "flops": 1e12}


def test_with_memory_and_speed_known_the_planner_decides(model: str) -> None:
    words = ("--model", model, "--batch-size", "8", "--pipeline-stages", "4", "--seed", "1")
    found = layout(machines(3, **KNOWN), *words)
    config = LINE.load(found.options)
    assert found.ranks == 3
    assert config.batch_size == 8
    assert config.pipeline_stages in (1, 3)
    assert found.ranks // config.pipeline_stages in (1, 2, 4)  # divides the batch
    assert found.line.startswith("layout planned again for 3 ranks: ")
    assert found.options[:-2] == ("--model", model, "--batch-size", "8", "--seed", "1")


def test_what_the_user_settled_the_planner_leaves(model: str) -> None:
    words = ("--model", model, "--schedule", "gpipe", "--micro-batch-size", "2")
    found = layout(machines(3, **KNOWN), *words, "--pipeline-stages", "4", "--no-grad-checkpoint")
    config = LINE.load(found.options)
    assert (config.schedule, config.micro_batch_size, config.grad_checkpoint) == (
        "gpipe",
        2,
        False,
    )


def test_machines_that_are_too_small_are_said_before_they_are_started(tmp_path: Path) -> None:
    directory = tmp_path / "large"
    directory.mkdir()
    config = tiny_config(layers=16, hidden_size=1024, intermediate_size=4096, vocab_size=1000)
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    small = Machine(host="small", memory=GIB // 4, flops=1e12)
    large = Machine(host="large", memory=8 * GIB, flops=1e12)
    words = ("--model", str(directory), "--max-seq-length", "64", "--pipeline-stages", "3")
    found = layout([small, large], *words)
    assert found.options == (*words[:-2], "--pipeline-stages", "2")
    with pytest.raises(DoesNotFitError, match="the model does not fit"):
        layout([small, small], *words)
