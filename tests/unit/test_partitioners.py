"""Dividing layers by name: uniform by count, balanced by cost."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.errors import UserError
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners import (
    PARTITIONERS,
    LayerCosts,
    balanced,
    get_partitioner,
    train_costs,
    uniform,
)
from shardmlx.stage_map import Partition

SHAPE = ModelShape(
    model_type="llama",
    num_layers=4,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=32,
    tied=False,
    windows=(None,) * 4,
)


def stage_costs(costs: LayerCosts, partition: Partition) -> list[Fraction]:
    exact = [Fraction(cost) for cost in costs.layers]
    exact[0] += Fraction(costs.embedding)
    exact[-1] += Fraction(costs.head)
    return [sum(exact[start:end], Fraction(0)) for start, end in partition.ranges]


def every_partition(num_layers: int, num_stages: int) -> list[Partition]:
    return [
        Partition(tuple(zip((0, *cuts), (*cuts, num_layers), strict=True)))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(30, 2, (15, 15)), (32, 5, (7, 7, 6, 6, 6)), (3, 3, (1, 1, 1)), (7, 1, (7,))],
)
def test_uniform_gives_what_is_left_over_to_earlier_stages(
    num_layers: int, num_stages: int, sizes: tuple[int, ...]
) -> None:
    assert uniform(LayerCosts((1.0,) * num_layers), num_stages).sizes == sizes


@pytest.mark.parametrize(
    ("costs", "num_stages", "sizes"),
    [
        (LayerCosts((1.0,) * 8), 4, (2, 2, 2, 2)),
        (LayerCosts((1.0,) * 10, head=2.0), 3, (4, 4, 2)),  # a head as dear as two layers
        (LayerCosts((1.0,) * 10, embedding=3.0, head=3.0), 4, (1, 4, 4, 1)),
        (LayerCosts((1.0,) * 4, head=100.0), 3, (2, 1, 1)),  # the others are even nonetheless
        (LayerCosts((1.0, 1.0, 3.0, 3.0, 3.0)), 2, (3, 2)),  # frozen layers below
        (LayerCosts((0.1,) * 7), 3, (3, 2, 2)),  # 0.1 + 0.1 + 0.1 compares equal everywhere
        (LayerCosts((0.0,) * 3), 2, (2, 1)),
    ],
)
def test_balanced_makes_the_costliest_stage_cheap(
    costs: LayerCosts, num_stages: int, sizes: tuple[int, ...]
) -> None:
    assert balanced(costs, num_stages).sizes == sizes


cost = st.one_of(st.integers(0, 4).map(float), st.floats(0, 1e6))


@settings(max_examples=300, deadline=None)
@given(st.lists(cost, min_size=1, max_size=9), cost, cost, st.data())
def test_balanced_is_the_best_of_all_partitions(
    layers: list[float], embedding: float, head: float, data: st.DataObject
) -> None:
    costs = LayerCosts(tuple(layers), embedding, head)
    num_stages = data.draw(st.integers(1, len(layers)))

    def rank(partition: Partition) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        stages = stage_costs(costs, partition)
        return max(stages), sum((each**2 for each in stages), Fraction(0)), partition.sizes[::-1]

    best = min(every_partition(len(layers), num_stages), key=rank)
    assert balanced(costs, num_stages) == best


@pytest.mark.parametrize("name", PARTITIONERS)
def test_there_is_no_partition_without_a_layer_for_every_stage(name: str) -> None:
    with pytest.raises(UserError, match="5 stages, but the model has 4 layers: use at most 4"):
        get_partitioner(name)(LayerCosts((1.0,) * 4), 5)
    with pytest.raises(UserError, match="0 pipeline stages: give 1 or more"):
        get_partitioner(name)(LayerCosts((1.0,) * 4), 0)


def test_partitioners_are_found_by_name() -> None:
    assert get_partitioner("balanced") is balanced
    assert get_partitioner("uniform") is uniform
    with pytest.raises(UserError, match="unknown partitioner 'even': use one of balanced, uniform"):
        get_partitioner("even")


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="a cost of"):
        LayerCosts((1.0, bad))


# What training costs: a forward is f for each of these layers, h for the head


def in_forwards(costs: LayerCosts) -> tuple[list[float], float, float]:
    forward = SHAPE.layer_flops(0, 16)
    layers = [layer / forward for layer in costs.layers]
    return layers, costs.embedding, costs.head / SHAPE.head_flops()


def test_lora_pays_for_input_gradients_from_the_first_trained_layer_up() -> None:
    costs = train_costs(SHAPE, 16, first_trained_layer=2, trains_weights=False)
    assert in_forwards(costs) == ([1, 1, 2, 2], 0, 2)


def test_full_fine_tuning_pays_for_weight_gradients_too() -> None:
    costs = train_costs(SHAPE, 16, first_trained_layer=1, trains_weights=True)
    assert in_forwards(costs) == ([1, 3, 3, 3], 0, 2)


def test_evaluation_pays_for_forward_only() -> None:
    costs = train_costs(SHAPE, 16, first_trained_layer=4, trains_weights=False)
    assert in_forwards(costs) == ([1, 1, 1, 1], 0, 1)
