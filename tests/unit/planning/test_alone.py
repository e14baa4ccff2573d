"""A plan beside each of its machines alone: what they gain together, or that none holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.planning.alone import Alone, compared, each_alone
from shardmlx.planning.choice import Choice
from shardmlx.planning.facts.chips import machines_of
from shardmlx.planning.memory.training_setup import BACKENDS
from shardmlx.planning.training_plan import plan_training
from tests.helpers.fake_models import MISTRAL_7B, write_config


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config(tmp_path / "mistral", MISTRAL_7B))


def beside(model: str, names: str, **options: object) -> tuple[Choice, tuple[Alone, ...]]:
    config = TrainConfig.from_flat(model=model, **options)
    machines = machines_of(names)
    return plan_training(config, machines), each_alone(config.spec, machines, BACKENDS[0])


def test_the_fastest_machine_that_holds_it_is_compared(model: str) -> None:
    choice, alone = beside(model, "M4 Max 128GB, M4 Max 128GB")
    (one,) = alone  # equal machines are tried once
    assert one.choice is not None
    ratio = one.choice.prediction.step_seconds / choice.prediction.step_seconds
    assert 1.5 < ratio <= 2.0
    (line,) = compared(choice, alone)
    assert line.startswith("M4 Max 128GB alone: step ")
    assert line.endswith(f", {ratio:.2f} times as long")


def test_a_small_gain_is_said_with_the_memory_that_is_left_as_a_reason(model: str) -> None:
    choice, alone = beside(model, "M1 8GB, M3 Ultra 256GB")
    assert [each.choice is None for each in alone] == [True, False]
    first, second = compared(choice, alone)
    assert first.startswith("M3 Ultra 256GB alone: step ")
    own = alone[1].choice
    assert own is not None
    peaks = own.prediction.ranks[0].peak, max(rank.peak for rank in choice.prediction.ranks)
    assert [f"{peak / 2**30:.2f} GiB" in second for peak in peaks] == [True, True]


def test_where_no_machine_holds_it_the_nearest_is_named_with_what_it_lacks(model: str) -> None:
    choice, alone = beside(model, "M4 16GB, M2 8GB, M4 16GB", batch_size=6)
    assert [each.choice for each in alone] == [None, None]
    least = min(each.lacks for each in alone)
    assert 0 < least < 8 * 2**30
    assert compared(choice, alone) == [
        f"no machine holds it alone: M4 16GB lacks {least / 2**30:.2f} GiB"
    ]


def test_how_several_ranks_divide_the_work_does_not_count_for_one(model: str) -> None:
    _, alone = beside(model, "M4 Max 128GB, M4 Max 128GB", pipeline_stages=2, schedule="zb-v")
    _, without = beside(model, "M4 Max 128GB, M4 Max 128GB")
    assert [each.choice and each.choice.run for each in alone] == [
        each.choice and each.choice.run for each in without
    ]


def test_one_machine_is_not_compared_with_itself(model: str) -> None:
    choice, alone = beside(model, "M4 Max 128GB")
    assert alone == ()
    assert compared(choice, alone) == []


def test_without_times_memory_alone_is_compared(model: str) -> None:
    choice, alone = beside(model, "16GB, 64GB")
    (line,) = compared(choice, alone)
    assert line.startswith("64GB holds it alone: ")
