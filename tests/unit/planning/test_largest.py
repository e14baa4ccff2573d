"""The longest sequence, the largest micro-batch and rank: they fit, and the next do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardmlx.common.units import MIB
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.errors import UserError
from shardmlx.planning.choice import Choice
from shardmlx.planning.training_plan import BITS, LONGEST, plan_training
from tests.helpers.models_and_batches import tiny_config

MACS = (Machine(host="a", wired=30 * MIB), Machine(host="b", wired=60 * MIB))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    shape = tiny_config(layers=8, hidden_size=256, intermediate_size=512)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return TrainConfig(model=str(tmp_path), num_layers=-1, max_seq_length=128)


def value_of(planned: Choice, question: str) -> int:
    batch = planned.asked.batch
    if question == "rank":
        return int(planned.asked.fine_tune.lora_parameters["rank"])
    return batch.max_seq_length if question == "seq" else int(batch.micro_batch_size or 0)


def with_value(config: TrainConfig, question: str, value: int) -> TrainConfig:
    if question == "seq":
        return replace(config, max_seq_length=value)
    if question == "batch":
        return replace(config, micro_batch_size=value, batch_size=len(MACS) * value)
    return replace(config, lora_parameters={**config.lora_parameters, "rank": value})


@pytest.mark.parametrize("question", ["seq", "batch", "rank"])
def test_the_answer_fits_and_the_next_does_not(config: TrainConfig, question: str) -> None:
    planned = plan_training(config, MACS, max_of=question)
    value = value_of(planned, question)
    assert all(rank.peak <= rank.capacity for rank in planned.prediction.ranks)
    assert plan_training(with_value(config, question, value), MACS).plan == planned.plan
    step = 32 if question == "seq" else 1
    more = value + max(step, 2 * value >> (BITS - 1))
    with pytest.raises(UserError, match="does not fit"):
        plan_training(with_value(config, question, more), MACS)


def test_more_than_is_looked_at_is_not_promised(config: TrainConfig) -> None:
    roomy = [replace(mac, wired=2**44) for mac in MACS]
    assert value_of(plan_training(config, roomy, max_of="seq"), "seq") == LONGEST
    assert value_of(plan_training(config, roomy, max_of="rank"), "rank") == 256


def test_where_nothing_fits_the_least_is_refused(config: TrainConfig) -> None:
    tight = [replace(mac, wired=MIB) for mac in MACS]
    for question in ("seq", "batch", "rank"):
        with pytest.raises(UserError, match="does not fit"):
            plan_training(config, tight, max_of=question)
