"""How a run goes on when hosts are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.config.specs import RunSpec
from shardmlx.config.train import LINE
from shardmlx.costmodel.hostfile import Machine
from shardmlx.errors import UserError
from shardmlx.hosts.launch_options import plan_again
from tests.helpers.fake_models import write_config
from tests.helpers.models_and_batches import tiny_config


def machines(count: int) -> list[Machine]:
    return [Machine(host=f"mac-{i}") for i in range(count)]


def layout(hosts: list[Machine], *options: str) -> tuple[int, tuple[str, ...], str]:
    config = LINE.load(["--train", *options])
    return plan_again(options, RunSpec.of(config), hosts, config.config)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Only the configuration of a small model of sixteen layers: enough to plan with."""
    config = tiny_config(layers=16, torch_dtype="float32")
    return str(write_config(tmp_path / "model", config))


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
        (4, "--tensor-parallel 2 --data-parallel 2"),
    ],
)
def test_what_still_fits_stays(count: int, options: str, model: str) -> None:
    words = ("--model", model, *options.split())
    assert layout(machines(count), *words)[1] == words


@pytest.mark.parametrize(
    ("count", "options", "ranks", "left"),
    [
        (3, "--pipeline-stages 4", 3, "--pipeline-stages 3"),
        (1, "--pipeline-stages=2", 1, "--pipeline-stages 1"),
        (3, "--pipeline-stages 1 --batch-size 4", 3, "--batch-size 4 --pipeline-stages 3"),
        (3, "--data-parallel 2", 3, "--pipeline-stages 3 --data-parallel 1"),
        (
            10,
            "--pipeline-stages 3 --schedule zb-v --batch-size 3",
            8,
            "--schedule zb-v --batch-size 3 --pipeline-stages 8",
        ),
        (18, "", 16, ""),
        (3, "--tensor-parallel 2", 3, "--pipeline-stages 3 --tensor-parallel 1"),
    ],
)
def test_what_does_not_fit_becomes_one_pipeline(
    count: int, options: str, ranks: int, left: str, model: str
) -> None:
    """More ranks than layers stay unused; the run chooses what nobody has settled."""
    *found, line = layout(machines(count), "--model", model, *options.split())
    assert found == [ranks, ("--model", model, *left.split())]
    assert (f", {count - ranks} unused: " in line) == (ranks < count)
    assert ("one pipeline of" in line) == bool(left)


def test_a_stage_map_stays_while_its_hosts_are_there(stage_map: str, model: str) -> None:
    words = ("--model", model, "--stage-map", stage_map)
    assert layout(machines(2), *words)[1] == words
    assert layout(machines(4), *words)[1] == words
    *found, line = layout(machines(3)[1:], *words)
    assert found == [2, ("--model", model)]
    assert f"instead of stage map {stage_map}" in line


def test_without_the_model_the_layout_is_still_found() -> None:
    _, options, _ = layout(machines(3), "--model", "./nowhere", "--pipeline-stages", "4")
    assert options == ("--model", "./nowhere", "--pipeline-stages", "3")


def test_a_stage_map_in_the_file_cannot_be_taken_out(
    stage_map: str, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"stage_map: {stage_map}\nmodel: {model}\n")
    with pytest.raises(UserError) as error:
        layout(machines(1), "-c", str(file))
    assert str(file) in error.value.problem
    assert "--stage-map" in error.value.remedy


def test_pipeline_stages_in_the_file_are_overruled(model: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"pipeline_stages: 2\nmodel: {model}\n")
    assert layout(machines(3), "-c", str(file))[1] == (
        *("-c", str(file)),
        *("--pipeline-stages", "3"),
    )
