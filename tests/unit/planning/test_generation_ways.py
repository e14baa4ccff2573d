"""How the ways to generate a text on given machines compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardmlx.modelfiles.parts import read_shape
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.ring import SUM_SECONDS
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.generation_ways import GenerationWay, generation_ways
from testbed.tiny_models import tiny_config

LAYERS, HIDDEN, GB = 4, 32, 1e9


def sizes(family: str = "llama", **shape: Any) -> ModelSizes:
    """Layers of 10 GB, and a head of 2 GB, which is not divided."""
    config = tiny_config(family, layers=LAYERS, hidden_size=HIDDEN, **shape)
    weights = LayerCosts((10 * GB,) * LAYERS, 0.0, 2 * GB)
    return ModelSizes(shape=read_shape(config), weight_sizes=weights, dtype="bfloat16")


def machines(count: int, **facts: Any) -> Cluster:
    mac = Machine(host="mac0", wired=100 << 30, bandwidth=100 * GB, link=GB, latency=1e-4)
    macs = (replace(mac, host=f"mac{i}") for i in range(count))
    return Cluster(machines=tuple(replace(each, **facts) for each in macs))


def seconds(ways: list[GenerationWay], ranks: int, across: int) -> float:
    (way,) = [w for w in ways if (len(w.hosts), w.tensor_parallel) == (ranks, across)]
    return 1 / way.tokens_per_second


def test_a_token_reads_a_share_of_all_weights_and_sums_twice_a_layer() -> None:
    ways = generation_ways(sizes(), machines(2), 100)
    assert seconds(ways, 1, 1) == pytest.approx(0.42)
    assert seconds(ways, 2, 1) == pytest.approx(0.42 + 2 * 1e-4, rel=1e-6)
    shared = 2 * LAYERS * (2 * (1e-4 + HIDDEN / GB) + SUM_SECONDS)
    assert seconds(ways, 2, 2) == pytest.approx(0.22 + shared, rel=0.01)  # norms are whole
    assert [str(each) for each in ways] == [
        "1 stage, --tensor-parallel 2",
        "mac0 alone",
        "2 stages",
    ]


def test_where_there_is_rdma_sums_are_counted_over_it_and_over_tcp() -> None:
    tcp = seconds(generation_ways(sizes(), machines(2), 100), 2, 2)
    ways = generation_ways(sizes(), machines(2, rdma=3e-5), 100)
    found = {str(each): 1 / each.tokens_per_second for each in ways}
    faster = 2 * LAYERS * (SUM_SECONDS + 2 * 1e-4 - 3e-5)
    assert found["1 stage, --tensor-parallel 2"] == pytest.approx(tcp)
    assert found["1 stage, --tensor-parallel 2, over RDMA"] == pytest.approx(tcp - faster)
    lacking = machines(2, rdma=3e-5)
    lacking = replace(
        lacking, machines=(replace(lacking.machines[0], rdma=None), lacking.machines[1])
    )
    assert not any(each.has_rdma for each in generation_ways(sizes(), lacking, 100))


def test_four_machines_are_stages_of_shares_too_and_late_messages_make_stages_better() -> None:
    near = generation_ways(sizes(num_key_value_heads=4), machines(4), 100)
    assert seconds(near, 4, 4) < seconds(near, 4, 2) < seconds(near, 4, 1)
    late = generation_ways(sizes(num_key_value_heads=4), machines(4, latency=0.1), 100)
    assert seconds(late, 4, 4) > seconds(late, 4, 2) > seconds(late, 4, 1)
    two_heads = generation_ways(sizes(), machines(4), 100)
    assert {each.tensor_parallel for each in two_heads} == {1, 2}


def test_the_machine_that_does_not_fit_comes_last() -> None:
    ways = generation_ways(sizes(), machines(2, wired=30 << 30), 100)
    assert [(len(each.hosts), each.fits) for each in ways] == [(2, True), (2, True), (1, False)]
    assert ways[0].peak == pytest.approx(22 * GB, rel=0.01)


def test_of_experts_a_token_reads_those_that_it_uses() -> None:
    mixture = sizes("mixtral", num_local_experts=8, num_experts_per_tok=2)
    layer = mixture.shape.layer(0)
    read = 10 * GB * LAYERS * layer.active_parameters / layer.parameters + 2 * GB
    assert seconds(generation_ways(mixture, machines(1), 100), 1, 1) == pytest.approx(
        read / (100 * GB)
    )


def test_nothing_is_said_of_a_memory_of_unknown_bandwidth() -> None:
    assert generation_ways(sizes(), machines(2, bandwidth=None), 100) == []
    assert len(generation_ways(sizes(), machines(1, bandwidth=None, kind="apple-m2"), 100)) == 1


def test_columns_of_all_experts_are_read_sooner_than_whole_ones_but_need_to_divide() -> None:
    """A token takes 2 of 8 experts: 1.43 on the busier of two ranks, by a normal distribution 1.52,
    where columns read as much as one."""

    def shared(width: int) -> dict[str, float]:
        how = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": width}
        ways = generation_ways(sizes("mixtral", **how), machines(2), 100)
        return {str(each): 1 / each.tokens_per_second for each in ways if each.tensor_parallel > 1}

    alike = 0.02 + 2 * LAYERS * (2 * (1e-4 + HIDDEN / GB) + SUM_SECONDS)  # the head, and sums
    (columns, sooner), (experts, later) = shared(4096).items()
    assert columns == "1 stage, --tensor-parallel 2"
    assert experts == "1 stage, --tensor-parallel 2 --expert-parallel"
    assert (later - alike) / (sooner - alike) == pytest.approx(1.52, rel=0.01)
    assert shared(16).keys() == {experts}
