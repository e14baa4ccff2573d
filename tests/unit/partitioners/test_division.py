"""Dividing layers by name: uniform by count, balanced by cost."""

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts, Problem, balanced, uniform
from shardmlx.pipeline.stage_map import StageMap
from tests.helpers.partitions import every_answer, homogeneous, stage_costs


def in_order(costs: LayerCosts, num_stages: int) -> Problem:
    return homogeneous(costs, tuple(range(num_stages)))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(30, 2, (15, 15)), (32, 5, (7, 7, 6, 6, 6)), (3, 3, (1, 1, 1)), (7, 1, (7,))],
)
def test_uniform_gives_what_is_left_over_to_earlier_stages(
    num_layers: int, num_stages: int, sizes: tuple[int, ...]
) -> None:
    problem = in_order(LayerCosts((1.0,) * num_layers), num_stages)
    assert uniform(problem).partition.sizes == sizes


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
    assert balanced(in_order(costs, num_stages)).partition.sizes == sizes


cost = st.one_of(st.integers(0, 4).map(float), st.floats(0, 1e6))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to nine layers on machines of their own costs, one or more stages a machine."""
    num_layers = draw(st.integers(1, 9))
    costs = st.builds(
        LayerCosts,
        st.lists(cost, min_size=num_layers, max_size=num_layers).map(tuple),
        embedding=cost,
        head=cost,
    )
    num_stages = draw(st.integers(1, num_layers))
    ranks = draw(st.integers(1, num_stages))
    placement = draw(st.permutations([stage % ranks for stage in range(num_stages)]))
    machines = draw(st.lists(costs, min_size=ranks, max_size=ranks))
    return Problem(placement=tuple(placement), costs=tuple(machines), sizes=draw(costs))


@settings(max_examples=100, deadline=None)
@given(problems())
def test_balanced_is_the_best_of_all_partitions(problem: Problem) -> None:
    def order(answer: StageMap) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        stages = stage_costs(problem, answer)
        evenness = sum((each**2 for each in stages), Fraction(0))
        return max(stages), evenness, answer.partition.sizes[::-1]

    assert balanced(problem) == min(every_answer(problem), key=order)


def test_a_problem_checks_itself() -> None:
    costs = LayerCosts((1.0,) * 4)
    with pytest.raises(UserError, match="5 stages, but"):
        in_order(costs, 5)
    for missing in ({"costs": (costs,)}, {"capacity": (1.0,)}, {"hosts": ("a",)}):
        fields: dict[str, Any] = {"placement": (0, 1), "costs": (costs, costs), "sizes": costs}
        with pytest.raises(ValueError, match="for 2 pipeline ranks"):
            Problem(**fields | missing)


def test_what_is_not_said_is_not_known_and_does_not_count() -> None:
    problem = in_order(LayerCosts((1.0,) * 4), 2)
    assert problem.capacity == (math.inf, math.inf)
    assert problem.transfer == ((0.0, 0.0), (0.0, 0.0))
    assert (problem.num_layers, problem.num_stages, problem.pp) == (4, 2, 2)


def test_answers_name_the_hosts() -> None:
    costs = LayerCosts((1.0,) * 3)
    problem = Problem(
        placement=(1, 0, 1), costs=(costs, costs), sizes=costs, hosts=("mini", "studio")
    )
    assert uniform(problem).hosts == ("studio", "mini", "studio")


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="a cost of"):
        LayerCosts((1.0, bad))


@given(st.lists(st.floats(0, 1e300), min_size=3, max_size=9))
@settings(deadline=None)
def test_exact_sums_give_every_total_to_the_bit(costs: list[float]) -> None:
    *layers, embedding, head = costs
    of_model = LayerCosts(tuple(layers), embedding, head)
    upto, scale = of_model.exact_sums()
    ranges = [(a, b) for b in range(1, len(layers) + 1) for a in range(b)]
    found = [(upto[stop] - upto[start]) / scale for start, stop in ranges]
    assert found == [of_model.total(*each) for each in ranges]
