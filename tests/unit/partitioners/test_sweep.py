"""What holds of every partitioner on thousands of random problems."""

from itertools import pairwise
from random import Random

import pytest

from shardmlx.errors import UserError
from shardmlx.partitioners import PARTITIONERS, Problem, get_partitioner, step_cost
from shardmlx.pipeline.stage_map import StageMap
from tests.helpers.partitions import (
    fits,
    random_problem,
    scaled,
    shares,
    with_memory,
    without_memory,
)

ROUNDING = 1 + 1e-9
CASES = 200


def random_problems(seed: int) -> list[Problem]:
    random = Random(seed)
    problems = []
    for _ in range(CASES):
        layers = random.randint(1, 14)
        problems.append(random_problem(random, layers, random.randint(1, min(5, layers))))
    return problems


def solve(name: str, problem: Problem) -> StageMap | None:
    """None where nothing fits."""
    try:
        return get_partitioner(name)(problem)
    except UserError as error:
        if name not in ("memory", "hetero") or "too much" not in str(error):
            raise
        return None


@pytest.mark.parametrize("name", PARTITIONERS)
def test_every_layer_has_one_machine_and_every_machine_some_layers(name: str) -> None:
    for problem in random_problems(1):
        answer = solve(name, problem)
        if answer is None:
            continue
        assert answer.partition.num_layers == problem.num_layers
        assert min(answer.partition.sizes) >= 1
        assert sorted(answer.placement) == sorted(problem.placement)
        if name != "hetero":
            assert answer.placement == problem.placement
        if name in ("memory", "hetero"):
            assert fits(problem, answer)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_answers_do_not_depend_on_units(name: str) -> None:
    for problem in random_problems(3):
        # By powers of two, which round nothing.
        other = scaled(problem, time=2.0**-10, size=2.0**20)
        assert solve(name, other) == solve(name, problem)


@pytest.mark.parametrize("name", ["memory", "hetero"])
def test_more_memory_never_hurts(name: str) -> None:
    for problem in random_problems(4):
        answers = [solve(name, with_memory(problem, factor)) for factor in (0.5, 1.0, 1.5, 3.0)]
        solved = [answer for answer in answers if answer is not None]
        assert answers[len(answers) - len(solved) :] == solved
        for less, more in pairwise(solved):
            if name == "memory":
                assert max(shares(problem, more)) <= max(shares(problem, less)) * ROUNDING
            else:
                assert step_cost(problem, more) <= step_cost(problem, less) * ROUNDING


def test_hetero_is_as_fast_as_any_other_that_fits() -> None:
    for problem in random_problems(5):
        best = solve("hetero", problem)
        unlimited = solve("hetero", without_memory(problem))
        assert unlimited is not None
        for name in PARTITIONERS:
            answer = solve(name, problem)
            if answer is None:
                continue
            assert step_cost(problem, unlimited) <= step_cost(problem, answer) * ROUNDING
            if fits(problem, answer):
                assert best is not None
                assert step_cost(problem, best) <= step_cost(problem, answer) * ROUNDING
