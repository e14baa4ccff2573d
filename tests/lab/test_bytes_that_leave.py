"""What leaves a host in a step is what the plan has said, by the counter of its network card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.planning.training_plan import plan_training
from tests.helpers.hosts import hosts
from tests.helpers.jobs import PROGRAMS
from tests.helpers.mpirun import mpirun

SHORT, LONG = 1, 4
"""Steps of two runs: what they have sent beside steps is the same."""

RUN: dict[str, Any] = {
    "model": "model", "data": "data", "fine_tune_type": "full", "num_layers": -1,
    "batch_size": 8, "micro_batch_size": 1, "max_seq_length": 33, "optimizer": "sgd",
    "schedule": "1f1b", "recompute": "none", "partitioner": "uniform", "val_batches": 0,
}  # fmt: skip

INT8 = {"pipeline_stages": 1, "zero": 0, "sum_dtype": "int8"}
DIVIDED_WEIGHTS = {"pipeline_stages": 1, "zero": 3}
STAGES = {"pipeline_stages": 2}
TWO_LEVELS = {"pipeline_stages": 1, "zero": 1}
HYBRID = {"pipeline_stages": 2, "zero": 1}


@pytest.mark.parametrize(
    ("slots", "runs"), [(1, [INT8, DIVIDED_WEIGHTS, STAGES]), (2, [TWO_LEVELS, HYBRID])]
)
def test_the_plan_counts_what_leaves_a_host(
    slots: int, runs: list[dict[str, Any]], small: Path, pirate: Path, tmp_path: Path
) -> None:
    machines = [
        Machine(host=host, flops=1e12, link=1e9, latency=1e-4)
        for host in ("mac1", "mac2")
        for _ in range(slots)
    ]
    # The first run opens the connections.
    steps = [(runs[0], SHORT), *((run, count) for run in runs for count in (SHORT, LONG))]
    commands = [
        ["--no-pack", *flags({**RUN, **options, "iters": count})] for options, count in steps
    ]
    with hosts(tmp_path, 2, slots=slots) as lab:
        for host in lab.hosts:
            shutil.copytree(small, lab.home(host) / "model")
            shutil.copytree(pirate, lab.home(host) / "data")
        program = PROGRAMS / "count_sent.py", json.dumps(commands)
        mpirun(2 * slots, command=lab.mpirun(2 * slots, *program)).well()
        files = [file for host in lab.hosts for file in lab.home(host).glob("sent-*")]
        assert len(files) == 2 * slots
        _, *most = map(max, zip(*(json.loads(file.read_text()) for file in files), strict=True))
    for options, few, many in zip(runs, most[::2], most[1::2], strict=True):
        config = TrainConfig(**{**RUN, **options, "model": str(small), "pack": False})
        planned = plan_training(config, machines).prediction.sent
        # Headers, and signs of life.
        assert planned <= (many - few) / (LONG - SHORT) <= 1.06 * planned + 4096, options


def flags(options: dict[str, Any]) -> list[str]:
    """Return options as they are typed."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
