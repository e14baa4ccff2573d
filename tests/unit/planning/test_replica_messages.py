"""The weights that replicas gather in a step, by the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.time.predict import memory_of_stages
from shardmlx.planning.time.replica_messages import Messages
from shardmlx.planning.training_plan import plan_training
from testbed.tiny_models import tiny_config

LAYERS, WIDTH, VOCABULARY, ROWS = 8, 64, 97, 8


def test_divided_weights_are_gathered_twice_a_micro_batch(tmp_path: Path) -> None:
    """And gradients sent. Two layers stay from each pass to the next, but not over an update."""
    config = tiny_config(layers=LAYERS, hidden_size=WIDTH, vocab_size=VOCABULARY)
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    run = TrainConfig.from_flat(
        model=str(tmp_path), fine_tune_type="full", num_layers=-1, batch_size=ROWS,
        micro_batch_size=1, max_seq_length=32, schedule="1f1b", recompute="none",
        optimizer="sgd", pipeline_stages=1, zero=3,
    )  # fmt: skip
    machines = [Machine(host=host, flops=1e12, link=1e9, latency=1e-6) for host in "ab"]
    choice = plan_training(run, machines)
    workload = choice.facts.work(choice.run)
    moved = Messages(choice.plan, workload, choice.facts.cluster, {}).gathers(0, LAYERS)
    layer = workload.weight_sizes.layers[0]
    microbatches = ROWS // 2
    upwards = LAYERS + (microbatches - 1) * (LAYERS - 2)
    assert microbatches * (moved.first + moved.forward) == pytest.approx(upwards * layer)
    assert moved.backward == (LAYERS - 2) * layer
    assert moved.gradients == pytest.approx(LAYERS * layer)
    assert moved.ends == 2 * 4 * WIDTH * VOCABULARY + 4 * WIDTH, "with the final norm"


@pytest.mark.parametrize(
    ("hosts", "options", "share"),
    [
        ("aabb", {}, 1 / 2),
        ("aabb", {"sum_dtype": "bfloat16"}, 2 / 4),
        ("aabb", {"zero": 0}, 1 / 2),
        ("abcd", {}, 3 / 4),
        ("aaab", {}, 3 / 4),
        ("aaaa", {}, 0.0),
    ],
)
def test_a_host_sends_what_its_replicas_have_added_up_once(
    hosts: str, options: dict[str, Any], share: float, tmp_path: Path
) -> None:
    """Of the gradients there and back; in bfloat16 half of the bytes, which each rank sends."""
    config = tiny_config(layers=LAYERS, hidden_size=WIDTH, vocab_size=VOCABULARY)
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    run = TrainConfig.from_flat(
        model=str(tmp_path), num_layers=-1, batch_size=ROWS, micro_batch_size=1,
        max_seq_length=32, schedule="1f1b", pipeline_stages=1, tensor_parallel=1, **options,
    )  # fmt: skip
    machines = [Machine(host=host, flops=1e12, link=1e6, latency=0.0) for host in hosts]
    choice = plan_training(run, machines)
    workload = choice.facts.work(choice.run)
    stages = memory_of_stages(choice.plan, choice.facts.cluster.setup(workload, 1, 32, 4))
    messages = Messages(choice.plan, workload, choice.facts.cluster, stages)
    expected = share * 2 * stages[0].gradients / 1e6
    assert messages.sum_seconds() == pytest.approx(expected, rel=0.02)
