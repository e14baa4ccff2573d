"""How a run is divided before it loads, and what is refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.generate import GenerateConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.memory_limits import budgets_of
from shardmlx.costmodel.workload import ModelSizes
from shardmlx.errors import UserError
from shardmlx.inference.plan import (
    InferencePlan,
    Load,
    plan_inference,
    planned_memory,
)
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners import LayerCosts
from shardmlx.pipeline.stage_map import read_stage_map
from tests.helpers.models_and_batches import tiny_config

LAYERS = 8
MB = 1 << 20


def workload(family: str = "llama", **shape: Any) -> ModelSizes:
    """Layers of 1 MiB, ends of 2 MiB; keys and values of 128 bytes a token and layer."""
    config = tiny_config(family, layers=LAYERS, vocab_size=20000, **shape)
    return ModelSizes(
        shape=ModelShape.from_config(config),
        weight_sizes=LayerCosts((MB,) * LAYERS, 2 * MB, 2 * MB),
        dtype="float32",
    )


def cluster(*memories: int) -> Cluster:
    return Cluster(
        machines=tuple(Machine(host=f"mac{i}", memory=memory) for i, memory in enumerate(memories))
    )


def plan(load: Load, *memories: int, family: str = "llama", **options: object) -> InferencePlan:
    config = GenerateConfig(model="m", **options)  # type: ignore[arg-type]
    given = None if config.stage_map is None else read_stage_map(config.stage_map)
    machines = cluster(*memories)
    budgets = budgets_of(machines, config.memory_limit)
    return plan_inference(config, given, load, workload(family), machines, budgets, "digest")


ONE = Load(sequences=1, prompt=500, answer=100, context=600)
MANY = Load(sequences=20, prompt=500, answer=100, context=600)
LONG = Load(sequences=20, prompt=5000, answer=1000, context=6000)
ROOM = 1 << 30


def test_one_text_balances_its_prompt() -> None:
    """The head sees one position of it: it hardly counts."""
    made = plan(ONE, ROOM, ROOM)
    assert made.stage_map.partition.sizes == (4, 4)
    assert (made.groups, made.most, made.chunk) == (1, 1, 128)


def test_many_texts_balance_the_head_too() -> None:
    made = plan(MANY, ROOM, ROOM)
    first, last = made.stage_map.partition.sizes
    assert first > last
    assert (made.groups, made.most) == (2, 8)
    assert plan(MANY, ROOM, ROOM, ROOM, batch_size=2).groups == 2


def test_a_single_gpu_takes_the_chunks_of_mlx_lm() -> None:
    assert plan(ONE, ROOM).chunk == 2048
    assert plan(ONE, ROOM, prefill_step_size=33).chunk == 33


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_cpu_chunks_are_small_since_their_scores_are_held(ranks: int) -> None:
    cpus = replace(cluster(*[ROOM] * ranks), backend="cpu")
    long = Load(sequences=1, prompt=8000, answer=100, context=8100)

    def made(**options: int) -> InferencePlan:
        config = GenerateConfig(model="m", **options)  # type: ignore[arg-type]
        return plan_inference(config, None, long, workload(), cpus, budgets_of(cpus), "digest")

    assert made().chunk == 128
    peaks = [
        planned_memory(each, workload(), "cpu")[0].peak
        for each in (made(), made(prefill_step_size=1024))
    ]
    heads = workload().shape.layer(0).heads.queries
    assert peaks[1] - peaks[0] > 2 * 4 * heads * (1024 - 128) * 8100


def test_limited_caches_are_not_merged() -> None:
    assert plan(MANY, ROOM, ROOM, family="qwen2", max_kv_size=64, batch_size=6).groups == 6
    assert plan(MANY, ROOM, ROOM, max_kv_size=64, batch_size=6).max_kv_size is None


PACKED: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}


def test_quantised_caches_take_less_and_are_not_merged() -> None:
    """An element takes half a byte, and for 32 of them there are two float32."""
    work, cpus = workload(head_dim=32), cluster(ROOM)
    how = GenerateConfig(model="m", batch_size=6, **PACKED)
    made = plan_inference(how, None, LONG, work, cpus, budgets_of(cpus), "digest")
    assert made.groups == 6
    plain = replace(made, quantisation=None)
    assert made.digest != plain.digest
    packed, whole = (planned_memory(each, work, "gpu")[0].resident for each in (made, plain))
    elements = 6 * LAYERS * (6000 + 256) * 2 * 2 * 32
    assert whole - packed == elements * 4 - elements * (1 / 2 + 2 * 4 / 32)


def test_heads_that_cannot_be_quantised_in_such_groups() -> None:
    with pytest.raises(UserError) as error:
        plan(ONE, ROOM, **PACKED)
    assert str(error.value) == (
        "--kv-group-size 32 does not divide the heads of llama, which have 8 elements: "
        "leave --kv-bits out"
    )


def test_a_context_that_does_not_fit_is_refused_with_numbers() -> None:
    # Capacity is three quarters of the memory.
    with pytest.raises(UserError) as error:
        plan(Load(8, 500, 100_000, 100_500), 64 * MB, 2000 * MB, partitioner="balanced")
    assert str(error.value) == (
        "rank 0 (mac0) would take 0.39 GiB of its 48.0 MiB (75% of the machine's memory) "
        "for layers 0-3, 0.38 GiB for the KV cache of 8 sequences of 100500 tokens: "
        "lower --max-tokens or --batch-size, try --partitioner memory, or use more machines"
    )
    assert plan(ONE, 64 * MB, 2000 * MB).stage_map.num_stages == 2


def test_a_memory_limit_may_be_what_is_to_be_raised() -> None:
    too_long = Load(8, 500, 100_000, 100_500)
    with pytest.raises(
        UserError, match=r": give --memory-limit 401MiB or more, lower --max-tokens"
    ):
        plan(too_long, 500 * MB, 2000 * MB, memory_limit=48 * MB, partitioner="balanced")
    # Where the machine has as much.
    with pytest.raises(UserError, match=r": lower --max-tokens or --batch-size, try --partitioner"):
        plan(too_long, 64 * MB, 2000 * MB, memory_limit=48 * MB, partitioner="balanced")
    with pytest.raises(UserError, match=r"^the model does not fit: .*: raise --memory-limit, "):
        plan(too_long, 64 * MB, 64 * MB, memory_limit=48 * MB, partitioner="memory")


def test_what_does_not_fit_when_divided_by_time_is_divided_by_memory() -> None:
    sizes = plan(Load(8, 500, 20_000, 20_500), 100 * MB, 2000 * MB).stage_map.partition.sizes
    assert sizes[0] < sizes[1]


def test_of_what_is_planned_weights_and_caches_are_always_there() -> None:
    """Four layers of 1 MiB and an end of 2 MiB each; a tied matrix is at both ends."""
    work, cpus = workload(), cluster(ROOM, ROOM)
    made = plan(ONE, ROOM, ROOM)
    first, last = planned_memory(made, work, cpus.backend)
    kept = 4 * 128 * (600 + 256)
    assert first.resident == 6 * MB + kept
    assert last.resident >= 6 * MB + kept
    assert first.peak > first.resident
    longer = replace(made, chunk=2 * made.chunk)
    peak = planned_memory(longer, work, cpus.backend)[0].peak
    assert peak - first.resident == 2 * (first.peak - first.resident)


def test_what_fits_in_no_way_is_refused_by_the_partitioner() -> None:
    with pytest.raises(UserError, match=r"^the model does not fit: .*: lower --max-tokens, or use"):
        plan(Load(1, 500, 10**6, 10**6), 64 * MB, 64 * MB, partitioner="memory")


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ("- num_layers: 8", r"needs 1 ranks, and there are 2: start mpirun with -n 1"),
        ("- num_layers: 4\n- num_layers: 3", r"divides 7 layers"),
        (
            "- {num_layers: 4, rank: 1}\n- {num_layers: 4, rank: 0}",
            r"has stage 1 on rank 0: text is generated with one stage a rank, in order",
        ),
    ],
)
def test_maps_that_cannot_generate(stages: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(f"stages:\n{stages}\n")
    with pytest.raises(UserError, match=complaint):
        plan(ONE, ROOM, ROOM, stage_map=str(path))
