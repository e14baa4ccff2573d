"""What leaves a host in a step, by the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.predict import Prediction
from shardmlx.planning.training_plan import plan_training
from tests.helpers.models_and_batches import tiny_config

LAYERS, WIDTH, VOCABULARY, LENGTH, ROWS = 8, 64, 97, 32, 8


def planned(directory: Path, hosts: str, **options: Any) -> Prediction:
    config = tiny_config(layers=LAYERS, hidden_size=WIDTH, vocab_size=VOCABULARY)
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    run = TrainConfig(
        model=str(directory), fine_tune_type="full", num_layers=-1, batch_size=ROWS,
        micro_batch_size=1, max_seq_length=LENGTH, schedule="1f1b", recompute="none",
        optimizer="sgd", **options,
    )  # fmt: skip
    machines = [Machine(host=host, flops=1e12, link=1e9, latency=1e-6) for host in hosts]
    return plan_training(run, machines).prediction


def test_stages_send_hidden_states_up_and_gradients_down(tmp_path: Path) -> None:
    message = 4 * LENGTH * WIDTH
    assert planned(tmp_path, "ab", pipeline_stages=2).sent == ROWS * message
    # The middle one of three sends both.
    assert planned(tmp_path, "abc", pipeline_stages=3).sent == 2 * ROWS * message


def test_nothing_leaves_a_host_that_has_all_ranks(tmp_path: Path) -> None:
    assert planned(tmp_path, "aa", pipeline_stages=2).sent == 0
    assert planned(tmp_path, "aa", pipeline_stages=1, zero=1).sent == 0


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_send_gradients_there_and_back(tmp_path: Path, zero: int) -> None:
    """Or weights back, which are as long in float32."""
    two = planned(tmp_path, "ab", pipeline_stages=1, zero=zero).sent
    four = planned(tmp_path, "abcd", pipeline_stages=1, zero=zero).sent
    assert four == pytest.approx(1.5 * two)
    of_one_host = planned(tmp_path, "aabb", pipeline_stages=1, zero=zero).sent
    assert of_one_host == pytest.approx(2 * two), "two send to two"
    uneven = planned(tmp_path, "aaab", pipeline_stages=1, zero=zero).sent
    assert uneven == pytest.approx(1.5 * two), "three send to one, and it to three"
    shared = planned(tmp_path, "ab", pipeline_stages=1, zero=zero, grad_accumulation_steps=4).sent
    assert shared == pytest.approx(two / 4)


def test_divided_weights_are_gathered_twice_a_micro_batch(tmp_path: Path) -> None:
    """And gradients sent. Two layers stay from each pass to the next, but not over an update."""
    layer = planned(tmp_path, "ab", pipeline_stages=1, zero=0).sent / 2 / LAYERS
    divided = planned(tmp_path, "ab", pipeline_stages=1, zero=3).sent
    microbatches = ROWS // 2
    upwards = LAYERS + (microbatches - 1) * (LAYERS - 2)
    down, gradients = microbatches * (LAYERS - 2), microbatches * LAYERS
    ends = microbatches * 2 * 4 * WIDTH * VOCABULARY / 2
    assert divided == pytest.approx((upwards + down + gradients) * layer + ends, rel=0.01)
