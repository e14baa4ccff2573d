"""What a run chooses where its options leave something open: the fastest way that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmlx.common.units import GIB, MIB
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.specs import COUNTED, RECOMPUTE, RunSpec
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.memory_limits import budgets_of, within
from shardmlx.costmodel.workload import Workload
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.shape import ModelShape
from shardmlx.pipeline.stage_map import Partition, StageMap
from shardmlx.training.choice import (
    Choice,
    Circumstances,
    SequenceLengths,
    choose,
    mean_lengths,
)
from shardmlx.training.plan import packing_fault
from tests.helpers.models_and_batches import tiny_config

ALIKE = SequenceLengths((96, 0), padded=96, exact=96)
PADDED = SequenceLengths((96, 0), padded=96, exact=60)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Only the configuration of a model of sixteen layers: enough to choose for it."""
    config = tiny_config(layers=16, hidden_size=256, intermediate_size=1024)
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return str(tmp_path)


def machines(*memories: float, host: str = "mac", link: float | None = None) -> Cluster:
    """Ranks with so many bytes each, on one host, or ``{}`` in its name tells them apart."""
    return Cluster(
        machines=tuple(
            Machine(host=host.format(rank), memory=round(memory), link=link, flops=1e12)
            for rank, memory in enumerate(memories)
        ),
        memory_fraction=1.0,
        backend="cpu",
    )


def choice_of(
    model: str,
    cluster: Cluster,
    lengths: SequenceLengths = ALIKE,
    *,
    given: StageMap | None = None,
    can_pack: bool = True,
    **options: Any,
) -> Choice | None:
    config = TrainConfig(model=model, batch_size=8, num_layers=-1, **options)
    run = RunSpec.of(config)
    budgets = budgets_of(cluster)
    sizes = Workload.of(open_model(model), run.fine_tune, run.batch)
    facts = Circumstances(
        sizes=sizes,
        given=given,
        cluster=within(cluster, budgets),
        budgets=budgets,
        lengths=lengths,
        can_pack=can_pack,
    )
    return choose(run, facts)


def chosen(*args: Any, **options: Any) -> Choice:
    choice = choice_of(*args, **options)
    assert choice is not None
    return choice


ROOM = (GIB, GIB)

SMALL = range(130 * MIB, 30 * MIB, -4 * MIB)


def test_rows_are_packed_where_that_saves_padding(model: str) -> None:
    choice = chosen(model, machines(*ROOM), PADDED)
    assert choice.plan.pack
    assert choice.relative_seconds < 0.75
    assert not chosen(model, machines(*ROOM), ALIKE, micro_batch_size=1).plan.pack
    assert not chosen(model, machines(*ROOM), PADDED, can_pack=False).plan.pack


def test_rows_are_not_packed_where_positions_in_the_row_matter() -> None:
    shape = ModelShape.from_config(tiny_config())
    assert packing_fault(shape) is None
    dynamic = packing_fault(replace(shape, has_dynamic_rope=True))
    assert dynamic is not None
    assert "of type dynamic" in dynamic
    assert packing_fault(ModelShape.from_config(tiny_config("internlm3"))) == (
        "the model's layers take a position in the row for one in the sequence"
    )


@pytest.mark.parametrize("are_alike", [True, False])
def test_short_rows_go_several_to_a_micro_batch(are_alike: bool, model: str) -> None:
    """Since each micro-batch costs something whatever its size; each rank still has one at a time,
    and where the size is given it is taken. Packing rows of one length would make one long row of
    them, whose attention takes longer."""
    sizes = {}
    for length in (16, 64, 2048):
        lengths = SequenceLengths((length, 0), length, length if are_alike else length * 3 // 4)
        plan = chosen(model, machines(*ROOM), lengths).plan
        sizes[length] = plan.micro_batch_size
        assert plan.pack != are_alike
    assert sizes[16] > sizes[2048] == 1
    assert 4 >= sizes[16] >= sizes[64] > 1
    assert chosen(model, machines(*ROOM), PADDED, micro_batch_size=1).plan.micro_batch_size == 1


def test_a_schedule_with_a_smaller_bubble_is_taken(model: str) -> None:
    choice = chosen(model, machines(*ROOM), micro_batch_size=1)
    assert choice.plan.schedule != "1f1b"
    text = str(choice)
    assert text.startswith(f"chosen: {choice.plan.schedule}, not packed, micro-batches of 1: ")
    assert text.endswith(f"{1 / choice.relative_seconds:.2f} times as fast as 1f1b unpacked")
    assert 1 / choice.relative_seconds > 1.05


def test_between_hosts_whose_links_are_not_known_messages_are_few(model: str) -> None:
    assert chosen(model, machines(*ROOM, host="mac{}")).plan.schedule == "1f1b"
    fast = chosen(model, machines(*ROOM, host="mac{}", link=5e9))
    assert fast.plan.schedule != "1f1b"
    assert chosen(model, machines(*ROOM, host="mac{}", link=1e5)).plan.schedule == "1f1b"


def test_what_is_given_is_taken(model: str) -> None:
    settled: dict[str, Any] = {"schedule": "zb-h1", "pack": False, "recompute": "full"}
    choice = chosen(model, machines(*ROOM), PADDED, partitioner="uniform", **settled)
    assert (choice.plan.schedule, choice.plan.pack) == ("zb-h1", False)
    assert choice.run.batch.recompute == "full"
    assert choice.run.layout.partitioner == "uniform"
    assert choice.relative_seconds == 1


def test_a_stage_map_leaves_the_schedules_that_it_suits(model: str) -> None:
    given = StageMap(Partition.from_sizes([4, 4, 4, 4]), (0, 1, 1, 0))
    choice = chosen(model, machines(*ROOM), given=given)
    assert choice.plan.schedule == "zb-v"
    assert choice.plan.stage_map == given


def test_what_does_not_fit_as_fast_as_can_be_is_made_to_fit(model: str) -> None:
    """First by another division, then by gradient checkpointing, as it gets tighter."""
    work: dict[str, Any] = {"schedule": "1f1b", "pack": False}
    roomy = chosen(model, machines(*ROOM), **work)
    assert roomy.lacking is None
    seen = set()
    for nbytes in SMALL:
        choice = choice_of(model, machines(nbytes, nbytes), **work)
        if choice is None:
            break
        ways = choice.run.layout.partitioner, choice.run.batch.recompute
        seen.add(ways)
        assert (choice.lacking is None) == (ways == ("balanced", "none"))
        if choice.lacking is not None:
            assert f"the simplest way does not fit: {choice.lacking}" in str(choice)
            assert "would take" in choice.lacking
    else:
        pytest.fail("there was always a way")
    assert {recompute for _, recompute in seen} == set(RECOMPUTE)
    assert choice_of(model, machines(100 * MIB, 8 * MIB), recompute="none") is None


def test_the_last_resort_are_micro_batches_of_one_row(model: str) -> None:
    choices = [choice_of(model, machines(nbytes)) for nbytes in (GIB, *SMALL)]
    rows = [choice.plan.micro_batch_size for choice in choices if choice is not None]
    assert sorted(rows, reverse=True) == rows
    assert set(rows) == {8, 1}
    last = [choice for choice in choices if choice is not None][-1]
    assert last.run.batch.micro_batch_size == 1


def test_unequal_machines_get_layers_by_memory(model: str) -> None:
    choice = chosen(model, machines(GIB, 40 * MIB), schedule="1f1b", recompute="none")
    assert choice.run.layout.partitioner == "memory"
    first, last = choice.plan.stage_map.partition.sizes
    assert first > last
    assert f"layers divided by memory, {first} + {last}" in str(choice)


def test_one_rank_orders_nothing(model: str) -> None:
    choice = chosen(model, machines(GIB))
    assert (choice.plan.schedule, choice.run.layout.partitioner) == ("1f1b", "balanced")
    assert str(choice) == "chosen: 1f1b, not packed, micro-batches of 8: as the simplest way"


def test_the_lengths_of_rows_with_and_without_padding() -> None:
    samples = [(np.zeros(length, np.int32), 0) for length in (10, 33, 34, 200)]
    # Inputs are one token shorter, and padded to a multiple of 32 unless they are cut.
    assert mean_lengths(samples, 1, 128) == (
        round((32 + 64 + 64 + 128) / 4),
        round((9 + 32 + 33 + 127) / 4),
        1.0,
    )
    assert mean_lengths(samples, 3, 128)[1] == round((9 + 32 + 33) / 3)


def test_the_share_of_tokens_that_count() -> None:
    """Of two answers, and of none: the prompt is longer than what is looked at."""
    samples = [
        (np.zeros(11, np.int32), 6),
        (np.zeros(21, np.int32), 1),
        (np.zeros(50, np.int32), 45),
    ]
    assert mean_lengths(samples, 1, 41)[2] == (5 + 20 + 0) / (10 + 20 + 40)


def test_logits_are_computed_where_tokens_count_if_that_is_faster(model: str) -> None:
    """And the last rank, which has the head, gets more layers. A head that takes little is computed
    as in mlx-lm."""

    def of(counted: float, vocabulary: int, **options: Any) -> Choice:
        config = Path(model, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": vocabulary}))
        return chosen(model, machines(*ROOM), replace(ALIKE, counted=counted), **options)

    some, all_of_them = of(0.3, 16384), of(1.0, 16384)
    assert some.run.batch.loss_chunk == COUNTED
    assert "logits only where a token counts" in str(some)
    assert all_of_them.run.batch.loss_chunk == AUTO
    assert some.plan.stage_map.partition.sizes[-1] > all_of_them.plan.stage_map.partition.sizes[-1]
    assert of(0.3, 64).run.batch.loss_chunk == AUTO
    assert of(0.3, 16384, loss_chunk=OFF).run.batch.loss_chunk == OFF
    # Padding does not count either.
    assert chosen(model, machines(*ROOM), PADDED, pack=False).run.batch.loss_chunk == COUNTED
