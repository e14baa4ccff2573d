"""The fastest step on unequal machines, against all partitions in all orders."""

import sys
from dataclasses import replace
from random import Random

import pytest

from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts, Problem, fastest_in_order, hetero, step_cost
from shardmlx.partitioners.hetero import kinds_of, orders_to_try
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import Partition, StageMap
from tests.helpers.partitions import (
    every_answer,
    every_answer_in_any_order,
    fits,
    homogeneous,
    random_problem,
    with_memory,
)

ROUNDING = 1 + 1e-9


def machines(*seconds: float, layers: int = 6, **fields: object) -> Problem:
    costs = tuple(LayerCosts((each,) * layers) for each in seconds)
    problem = Problem(placement=tuple(range(len(seconds))), costs=costs, sizes=costs[0])
    return replace(problem, **fields)  # type: ignore[arg-type]


def test_a_step_is_one_micro_batch_through_all_and_the_rest_behind_the_slowest() -> None:
    links = ((9.0, 0.25), (0.5, 0.0))
    problem = machines(1.0, 2.0, transfer=links, microbatches=5)
    answer = StageMap(Partition.from_sizes([4, 2]), (0, 1))
    assert step_cost(problem, answer) == (4 + 4) + (0.25 + 0.5) + 4 * 4
    # Stages of one rank add up, and send each other nothing.
    problem = machines(1.0, 1.0, transfer=links, microbatches=2)
    answer = StageMap(Partition.from_sizes([1, 1, 1, 3]), (0, 0, 1, 0))
    assert step_cost(problem, answer) == 6 + 2 * 0.75 + 5


def test_one_micro_batch_wants_little_on_the_slow_machine_many_want_all_busy_alike() -> None:
    assert hetero(machines(1.0, 2.0)).partition.sizes == (5, 1)
    assert hetero(machines(1.0, 2.0, microbatches=100)).partition.sizes == (4, 2)


def test_a_small_machine_goes_where_little_is_held() -> None:
    def peak(stage: int, start: int, stop: int) -> float:
        return (stop - start) * (2 - stage)

    problem = machines(1.0, 1.0, peak=peak, capacity=(3.0, 12.0), microbatches=8)
    answer = hetero(problem)
    assert (answer.placement, answer.partition.sizes) == ((1, 0), (3, 3))


def test_more_layers_may_hold_less_from_the_first_trained_one_on() -> None:
    def peak(stage: int, start: int, stop: int) -> float:
        return stop - start + (3 if start > 1 else 0)

    # The first stage could have three layers. Then no room is left for the gradient above it.
    problem = machines(1.0, 1.0, layers=4, peak=peak, capacity=(3.0, 3.0), first_trained=1)
    assert hetero(problem).partition.sizes == (1, 3)


def test_the_given_order_stays_where_no_other_is_better() -> None:
    problem = machines(2.0, 1.0, 3.0, 1.0, microbatches=4, placement=(3, 0, 2, 1))
    assert hetero(problem).placement == (3, 0, 2, 1)


def test_hetero_is_the_best_of_all_partitions_in_all_orders() -> None:
    random = Random(3)
    infeasible = 0
    for _ in range(300):
        layers = random.randint(1, 6)
        problem = random_problem(random, layers, random.randint(1, min(4, layers)))
        feasible = [each for each in every_answer_in_any_order(problem) if fits(problem, each)]
        if not feasible:
            infeasible += 1
            with pytest.raises(UserError, match="too much"):
                hetero(problem)
            continue
        best = min(step_cost(problem, answer) for answer in feasible)
        answer = hetero(problem)
        assert fits(problem, answer)
        assert step_cost(problem, answer) <= best * ROUNDING
    assert 20 < infeasible < 200


def test_what_passes_once_adds_up_and_is_weighed_against_the_pace() -> None:
    slow_once = (LayerCosts((1.0,) * 6), LayerCosts((10.0,) * 6))
    problem = machines(2.0, 1.0, once=slow_once, microbatches=11)
    # The pace alone would have 2 and 4 layers: 8 + 10 * 4, and once 2 + 40.
    assert step_cost(problem, StageMap(Partition.from_sizes([2, 4]), (0, 1))) == 8 + 40 + 42
    assert fastest_in_order(problem).partition.sizes == (2, 4)
    assert fastest_in_order(replace(problem, microbatches=2)).partition.sizes == (5, 1)


def test_in_the_given_order_it_is_the_best_of_all_partitions_with_what_passes_once() -> None:
    random = Random(5)
    for _ in range(200):
        layers = random.randint(1, 6)
        problem = random_problem(random, layers, random.randint(1, min(4, layers)))
        once = tuple(
            LayerCosts(
                tuple(random.choice([0.0, 0.5, 3.0]) for _ in range(layers)), head=random.random()
            )
            for _ in range(problem.pp)
        )
        problem = replace(problem, once=once)
        feasible = [each for each in every_answer(problem) if fits(problem, each)]
        if not feasible:
            with pytest.raises(UserError):
                fastest_in_order(problem)
            continue
        answer = fastest_in_order(problem)
        assert answer.placement == problem.placement
        best = min(step_cost(problem, each) for each in feasible)
        assert step_cost(problem, answer) <= best * ROUNDING


def test_with_too_many_kinds_of_machines_the_given_order_is_solved_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["shardmlx.partitioners.hetero"], "MAX_PLACINGS", 0)
    random = Random(4)
    for _ in range(200):
        layers = random.randint(2, 8)
        problem = with_memory(random_problem(random, layers, random.randint(2, min(4, layers))), 9)
        best = min(step_cost(problem, answer) for answer in every_answer(problem))
        assert step_cost(problem, hetero(problem)) <= best * ROUNDING


def test_orders_are_searched_by_kinds_of_machines() -> None:
    two_kinds = machines(*[1.0, 2.0] * 8, layers=16)
    given, every = orders_to_try(two_kinds, kinds_of(two_kinds))
    assert given.nodes == (1,) * 16
    assert every.kinds == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))
    assert sum(every.nodes) + 1 == 9 * 9
    alike = machines(*[1.0] * 16, layers=16)
    assert len(orders_to_try(alike, kinds_of(alike))) == 1
    all_different = machines(*map(float, range(1, 17)), layers=16)
    (tried,) = orders_to_try(all_different, kinds_of(all_different))
    assert tried.nodes == (1,) * 16


def test_several_stages_a_rank_are_refused() -> None:
    costs = LayerCosts((1.0,) * 8)
    with pytest.raises(UserError, match="4 stages on 2"):
        hetero(homogeneous(costs, get_schedule("zb-v").placement(2, 2)))


def test_what_fits_in_no_order_is_said_for_the_order_that_lacks_least() -> None:
    def peak(stage: int, start: int, stop: int) -> float:
        return (stop - start) * (10 if stage == 0 else 1) * 2.0**30

    problem = machines(1.0, 1.0, peak=peak, capacity=(2.0 * 2**30, 20.0 * 2**30))
    with pytest.raises(UserError, match=r"rank 0 would hold 10.00 GiB of its 2.00 GiB"):
        hetero(problem)
