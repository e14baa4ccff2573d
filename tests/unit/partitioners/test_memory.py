"""Dividing layers so that they fit."""

import math
from dataclasses import replace
from random import Random

import pytest

from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts, Partitioner, Problem, hetero, memory
from tests.helpers.partitions import (
    every_answer,
    fits,
    homogeneous,
    random_problem,
    shares,
    with_memory,
)

GIB = 2.0**30
LAYER = LayerCosts((GIB,) * 8)


def machines(*gib: float, **fields: object) -> Problem:
    """Eight layers of 1 GiB each, and what each machine has."""
    base = homogeneous(LAYER, tuple(range(len(gib))))
    return replace(base, capacity=tuple(each * GIB for each in gib), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gib", "sizes"),
    [((8.0, 8.0), (4, 4)), ((12.0, 4.0), (6, 2)), ((2.0, 6.0, 2.0), (1, 6, 1)), ((8.0,), (8,))],
)
def test_memory_fills_machines_evenly(gib: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    assert memory(machines(*gib)).partition.sizes == sizes


def test_a_stage_that_begins_lower_may_hold_less() -> None:
    """From its lowest trained layer on a stage keeps nothing from I to W."""

    def peak(stage: int, start: int, stop: int) -> float:
        return GIB * (2 * stop if stage == 0 else stop - start + 5 * (start > 3))

    stage_map = memory(machines(99.0, 99.0, peak=peak))
    assert sum(stage_map.partition.sizes) == 8
    assert max(peak(i, *ends) for i, ends in enumerate(stage_map.partition.ranges)) <= 9 * GIB


def test_what_does_not_fit_is_said_with_how_much_is_lacking() -> None:
    lacking = r"rank 1 \(studio.local\) would hold 5.00 GiB of its 4.00 GiB .* 1.00 GiB too much"
    with pytest.raises(UserError, match=lacking):
        memory(machines(3.0, 4.0, hosts=("mini.local", "studio.local")))


@pytest.mark.parametrize("partitioner", [memory, hetero])
def test_a_machine_smaller_than_one_layer_is_named(partitioner: Partitioner) -> None:
    with pytest.raises(UserError, match=r"rank 2 would hold 1.00 GiB of its 0.75 GiB"):
        partitioner(machines(64.0, 64.0, 0.75))


def test_memory_must_be_told_what_machines_have() -> None:
    with pytest.raises(UserError, match="rank 1"):
        memory(machines(8.0, math.inf))


def test_the_stages_of_a_rank_share_its_memory() -> None:
    problem = replace(homogeneous(LAYER, (0, 1, 1, 0)), capacity=(12 * GIB, 4 * GIB))
    assert memory(problem).partition.sizes == (3, 1, 1, 3)
    with pytest.raises(UserError, match=r"stage 1 .* and stage 2 "):
        memory(replace(problem, capacity=(12 * GIB, GIB)))


def test_memory_is_the_best_of_all_partitions() -> None:
    random = Random(2)
    for _ in range(200):
        layers = random.randint(1, 9)
        problem = random_problem(random, layers, random.randint(1, min(4, layers)))
        best = min(max(shares(problem, answer)) for answer in every_answer(problem))
        if best > 1:
            with pytest.raises(UserError, match="too much"):
                memory(problem)
            problem = with_memory(problem, 2 * best)
            best /= 2 * best
        answer = memory(problem)
        assert fits(problem, answer)
        assert max(shares(problem, answer)) == pytest.approx(best)
