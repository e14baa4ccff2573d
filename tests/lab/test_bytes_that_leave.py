"""What leaves a host in a step is what the plan has said, by the counter of its network card."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.planning.training_plan import plan_training
from tests.helpers.hosts import Lab, hosts
from tests.helpers.mpirun import mpirun

SHORT, LONG = 2, 6
"""Steps of two runs: what they have sent beside steps is the same."""

RUN: dict[str, Any] = {
    "model": "model", "data": "data", "fine_tune_type": "full", "num_layers": -1,
    "batch_size": 8, "micro_batch_size": 1, "max_seq_length": 33, "optimizer": "sgd",
    "schedule": "1f1b", "recompute": "none", "partitioner": "uniform", "val_batches": 0,
}  # fmt: skip

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "two levels": (2, {"pipeline_stages": 1, "zero": 1}),
    "int8": (1, {"pipeline_stages": 1, "zero": 0, "sum_dtype": "int8"}),
    "divided weights": (1, {"pipeline_stages": 1, "zero": 3}),
    "stages": (1, {"pipeline_stages": 2}),
    "hybrid": (2, {"pipeline_stages": 2, "zero": 1}),
}


def leaves(lab: Lab, slots: int, options: dict[str, Any], steps: int) -> int:
    """Bytes that the host which sends most has sent in a run."""
    before = [sent(lab, host) for host in lab.hosts]
    flags = [
        word
        for name, value in {**RUN, **options, "iters": steps}.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = lab.mpirun(2 * slots, "-m", "shardmlx.train", *flags, "--no-pack")
    job = mpirun(2 * slots, command=command)
    assert job.returncode == 0, job.output
    return max(sent(lab, host) - was for host, was in zip(lab.hosts, before, strict=True))


def sent(lab: Lab, host: str) -> int:
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    read = subprocess.run(lab.command(host, "cat", counter), capture_output=True, check=True)
    return int(read.stdout)


@pytest.mark.parametrize("run", RUNS)
def test_the_plan_counts_what_leaves_a_host(
    run: str, small: Path, pirate: Path, tmp_path: Path
) -> None:
    slots, options = RUNS[run]
    config = TrainConfig(**{**RUN, **options, "model": str(small), "pack": False})
    machines = [
        Machine(host=host, flops=1e12, link=1e9, latency=1e-4)
        for host in ("mac1", "mac2")
        for _ in range(slots)
    ]
    planned = plan_training(config, machines).prediction.sent
    with hosts(tmp_path, 2, slots=slots) as lab:
        for host in lab.hosts:
            shutil.copytree(small, lab.home(host) / "model")
            shutil.copytree(pirate, lab.home(host) / "data")
        few, many = (leaves(lab, slots, options, steps) for steps in (SHORT, LONG))
    # Headers, and signs of life.
    assert planned <= (many - few) / (LONG - SHORT) <= 1.06 * planned + 4096
