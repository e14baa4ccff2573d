"""The longest sequence fits, and the next does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardmlx.common.units import MIB
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.training_plan import BITS, LONGEST, plan_training
from testbed.tiny_models import tiny_config

MACS = (Machine(host="a", wired=30 * MIB), Machine(host="b", wired=60 * MIB))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    shape = tiny_config(layers=8, hidden_size=256, intermediate_size=512)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return TrainConfig.from_flat(model=str(tmp_path), num_layers=-1, max_seq_length=128)


def test_the_answer_fits_and_the_next_does_not(config: TrainConfig) -> None:
    planned = plan_training(config, MACS, max_of="seq")
    length = planned.asked.batch.max_seq_length
    assert all(rank.peak <= rank.capacity for rank in planned.prediction.ranks)
    assert plan_training(config.changed(max_seq_length=length), MACS).plan == planned.plan
    more = length + max(32, 2 * length >> (BITS - 1))
    with pytest.raises(UserError, match="does not fit"):
        plan_training(config.changed(max_seq_length=more), MACS)


def test_more_than_is_looked_at_is_not_promised(config: TrainConfig) -> None:
    roomy = [replace(mac, wired=2**44) for mac in MACS]
    assert plan_training(config, roomy, max_of="seq").asked.batch.max_seq_length == LONGEST


def test_where_nothing_fits_the_least_is_refused(config: TrainConfig) -> None:
    tight = [replace(mac, wired=MIB) for mac in MACS]
    with pytest.raises(UserError, match="does not fit"):
        plan_training(config, tight, max_of="seq")
