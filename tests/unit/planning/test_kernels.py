"""Layers whose recurrence has no kernel on CUDA go to Macs in a plan, and what stays is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmlx.main import main
from shardmlx.pipeline.stage_map import StageMap, write_stage_map
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.fake_models import write_config

Capture = pytest.CaptureFixture[str]

ULTRA, SPARK = "M3 Ultra 96GB", "DGX Spark 128GB"
CONFIG = {
    "model_type": "qwen3_5",
    "text_config": {
        **UNDECLARED["qwen3_5"]["text_config"],
        "num_hidden_layers": 16,
        "hidden_size": 512,
        "intermediate_size": 2048,
    },
}
"""Every second layer loops, and the last does not."""


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(Path("model"), CONFIG)


def planned(capsys: Capture, machines: str, *words: str) -> dict[str, Any]:
    asked = ("--machines", machines, "--batch-size", "4", "--max-seq-length", "512", *words)
    assert main(["plan", "model", *asked, "--schedule", "1f1b", "--json", "plan.json"]) == 0
    capsys.readouterr()
    found: dict[str, Any] = json.loads(Path("plan.json").read_text())
    return found


def layers_of(plan: dict[str, Any], host: str) -> list[list[int]]:
    (rank,) = [each for each in plan["ranks"] if each["hosts"] == [host]]
    found: list[list[int]] = rank["layers"]
    return found


@pytest.mark.parametrize("machines", [f"{ULTRA}, {SPARK}", f"{SPARK}, {ULTRA}"])
def test_a_spark_with_four_times_the_flops_gets_the_one_end_that_does_not_loop(
    capsys: Capture, machines: str
) -> None:
    plan = planned(capsys, machines, "--pipeline-stages", "2")
    assert layers_of(plan, SPARK) == [[15, 16]]
    assert plan["notes"] == [
        f"CUDA has no kernel for the recurrence of 8 layers: {SPARK} has none of them"
    ]


def test_layers_that_a_stage_map_puts_there_are_named_with_what_they_take(capsys: Capture) -> None:
    """512 tokens of 90 us in 4 layers, and three times that for their gradients."""
    write_stage_map(StageMap.from_sizes([8, 8]), "map.yaml")
    plan = planned(capsys, f"{ULTRA}, {SPARK}", "--stage-map", "map.yaml")
    (note,) = plan["notes"]
    assert f"{SPARK} has layers 8, 10, 12, 14, for whose recurrence CUDA has no kernel" in note
    assert "512 tokens take 0.737 s more there" in note


def test_macs_alone_have_nothing_to_say_of_it(capsys: Capture) -> None:
    plan = planned(capsys, f"{ULTRA}, M2 Ultra 128GB", "--pipeline-stages", "2")
    assert plan["notes"] == []
