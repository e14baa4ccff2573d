"""Small problems of partitioning, all their answers, and what the answers are worth."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations
from random import Random

from shardmlx.partitioners import LayerCosts, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap


def homogeneous(costs: LayerCosts, placement: tuple[int, ...]) -> Problem:
    """Return stages on equal machines, of parameters as large as they are costly."""
    return Problem(placement=placement, costs=(costs,) * (max(placement) + 1), sizes=costs)


def every_partition(num_layers: int, num_stages: int) -> list[Partition]:
    return [
        Partition(tuple(zip((0, *cuts), (*cuts, num_layers), strict=True)))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]


def every_answer(problem: Problem) -> list[StageMap]:
    partitions = every_partition(problem.num_layers, problem.num_stages)
    return [problem.stage_map(partition) for partition in partitions]


def every_answer_in_any_order(problem: Problem) -> list[StageMap]:
    return [
        replace(each, placement=placement)
        for each in every_answer(problem)
        for placement in permutations(range(problem.pp))
    ]


def exact_sums(costs: LayerCosts, partition: Partition) -> list[Fraction]:
    exact = [Fraction(cost) for cost in costs.layers]
    exact[0] += Fraction(costs.embedding)
    exact[-1] += Fraction(costs.head)
    return [sum(exact[start:stop], Fraction(0)) for start, stop in partition.ranges]


def stage_costs(problem: Problem, answer: StageMap) -> list[Fraction]:
    return [
        exact_sums(problem.costs[rank], answer.partition)[stage]
        for stage, rank in enumerate(answer.placement)
    ]


def shares(problem: Problem, answer: StageMap) -> list[float]:
    """Return the part of its rank's memory that each stage holds."""
    return [
        problem.held(stage, *answer.partition.ranges[stage]) / problem.capacity[rank]
        for stage, rank in enumerate(answer.placement)
    ]


def fits(problem: Problem, answer: StageMap) -> bool:
    return max(shares(problem, answer)) <= 1


def random_problem(random: Random, layers: int, machines: int) -> Problem:
    """Return a problem of one stage a machine; one to three kinds of machines, some slow links."""
    base = [random.choice([1.0, 1.0, 2.0, random.uniform(0.5, 3)]) for _ in range(layers)]
    embedding, head = random.choice([0.0, 1.5]), random.choice([0.0, 2.0])
    sizes = LayerCosts(tuple(float(random.randint(1, 4)) for _ in base), 2.0, 3.0)
    kinds = [(random.choice([0.5, 1.0, 3.0]), random.choice([9.0, 30.0])) for _ in range(3)]
    chosen = [random.choice(kinds) for _ in range(machines)]
    links = random.choice([(0.0,), (0.5,), (0.25, 2.0)])
    held = random.choice([0.0, 0.5])  # of each micro-batch in flight, more of them at the start
    placement = list(range(machines))
    random.shuffle(placement)

    def peak(stage: int, start: int, stop: int) -> float:
        return sizes.total(start, stop) + held * (machines - stage) * (stop - start)

    return Problem(
        placement=tuple(placement),
        costs=tuple(
            LayerCosts(tuple(each * slow for each in base), embedding * slow, head * slow)
            for slow, _ in chosen
        ),
        sizes=sizes,
        peak=random.choice([peak, None]),
        capacity=tuple(memory for _, memory in chosen),
        transfer=tuple(
            tuple(random.choice(links) * (a != b) for b in range(machines)) for a in range(machines)
        ),
        microbatches=random.choice([1, 2, 4, 16]),
    )


def scaled(problem: Problem, time: float, size: float) -> Problem:
    peak = problem.peak
    return replace(
        problem,
        costs=tuple(costs.scaled(time) for costs in problem.costs),
        transfer=tuple(tuple(each * time for each in row) for row in problem.transfer),
        sizes=problem.sizes.scaled(size),
        peak=None if peak is None else lambda *stage: peak(*stage) * size,
        capacity=tuple(each * size for each in problem.capacity),
    )


def with_memory(problem: Problem, factor: float) -> Problem:
    return replace(problem, capacity=tuple(each * factor for each in problem.capacity))
