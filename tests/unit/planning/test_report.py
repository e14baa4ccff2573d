"""Which shorter types of sums a plan recommends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.planning.report import shorter_sums
from shardmlx.planning.training_plan import plan_training
from tests.helpers.fake_models import MISTRAL_7B


def advice(directory: Path, link: float, **options: Any) -> list[str]:
    (directory / "config.json").write_text(json.dumps(MISTRAL_7B))
    config = TrainConfig(
        model=str(directory), num_layers=-1, schedule="1f1b", batch_size=8,
        max_seq_length=512, recompute="none", partitioner="uniform", micro_batch_size=1,
        **{"dtype": "float32"} | options,
    )  # fmt: skip
    machines = [Machine(host=host, flops=50e12, link=link, latency=1e-6) for host in "ab"]
    return shorter_sums(plan_training(config, machines))


def test_replicas_of_a_full_fine_tune_on_a_slow_link(tmp_path: Path) -> None:
    full: dict[str, Any] = {"fine_tune_type": "full", "pipeline_stages": 1, "zero": 0}
    lines = advice(tmp_path, 125e6, **full)
    assert [line.split(" would")[0] for line in lines] == [
        "--sum-dtype bfloat16", "--sum-dtype int8",
    ]  # fmt: skip
    shorter = [int(re.findall(r"(\d+)% shorter", line)[0]) for line in lines]
    assert 35 < shorter[0] <= 50 < 55 < shorter[1] <= 75

    assert advice(tmp_path, 5e9, **full) == []
    assert advice(tmp_path, 125e6, **full, sum_dtype="int8") == []
