"""What holds of every partitioner on thousands of random problems."""

from random import Random

import pytest

from shardmlx.errors import UserError
from shardmlx.partitioners import PARTITIONERS, Problem
from shardmlx.pipeline.stage_map import StageMap
from tests.helpers.partitions import fits, random_problem, scaled

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
        return PARTITIONERS[name](problem)
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
