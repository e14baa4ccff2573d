"""Which shorter types of messages a plan recommends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.planning.training_plan import plan_training
from shardmlx.planning.wire_advice import wire_advice
from tests.helpers.fake_models import MISTRAL_7B


def advice(directory: Path, link: float, **options: Any) -> list[str]:
    (directory / "config.json").write_text(json.dumps(MISTRAL_7B))
    config = TrainConfig(
        model=str(directory), dtype="float32", num_layers=-1, schedule="1f1b", batch_size=8,
        max_seq_length=512, recompute="none", partitioner="uniform", micro_batch_size=1, **options,
    )  # fmt: skip
    machines = [Machine(host=host, flops=50e12, link=link, latency=1e-6) for host in "ab"]
    planned = plan_training(config, machines)
    return wire_advice(planned.workload, planned.cluster, planned.prediction, 512, recompute="none")


def test_replicas_of_a_full_fine_tune_on_a_slow_link(tmp_path: Path) -> None:
    full: dict[str, Any] = {"fine_tune_type": "full", "pipeline_stages": 1, "zero": 0}
    lines = advice(tmp_path, 125e6, **full)
    assert [line.split(" would")[0] for line in lines] == [
        "--sum-dtype bfloat16", "--sum-dtype int8",
    ]  # fmt: skip
    shorter = [int(re.findall(r"(\d+)% shorter", line)[0]) for line in lines]
    assert 40 < shorter[0] <= 50 < 60 < shorter[1] <= 75
    assert lines[0].endswith("it pays on links below 4 Gbit/s")
    assert advice(tmp_path, 5e9, **full) == []
    assert advice(tmp_path, 125e6, **full, sum_dtype="int8") == []


@pytest.mark.parametrize(("link", "count"), [(12.5e6, 1), (5e9, 0)])
def test_stages_on_a_slow_link(tmp_path: Path, link: float, count: int) -> None:
    lines = advice(tmp_path, link, pipeline_stages=2)
    assert [line.split(" would")[0] for line in lines] == ["--send-dtype bfloat16"] * count
