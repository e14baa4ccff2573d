"""Divide layers evenly: by their number, by their costs, or by any load of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from itertools import accumulate, pairwise

from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

_Squares = tuple[float, tuple[int, ...]]
"""Sum of squared loads, and bounds, last first and negated: the least starts late."""

StageLoad = Callable[[int, int, int], float]
"""Load of a stage with layers start to stop, by (stage, start, stop); it grows with the layers."""


def uniform(problem: Problem) -> StageMap:
    """Make numbers of layers as even as possible; earlier stages take the remainder."""
    even = evenest(problem.num_layers, problem.num_stages, lambda stage, start, stop: stop - start)
    return problem.stage_map(even)


def balanced(problem: Problem) -> StageMap:
    """Minimise, exactly, the largest cost of a stage on the machine that runs it.

    Embedding and lm_head count. Stages stay in their places. The stages of a rank are balanced one
    by one, not by their sum, since a schedule alternates between them.
    """
    # Floats are fractions of powers of two: scaled to integers, their exact sums make equal stages
    # compare equal on every machine.
    weights = []
    for costs in problem.costs:
        exact = [Fraction(cost) for cost in costs.layers]
        exact[0] += Fraction(costs.embedding)
        exact[-1] += Fraction(costs.head)
        weights.append(exact)
    scale = max(weight.denominator for exact in weights for weight in exact)
    upto = [list(accumulate((int(each * scale) for each in exact), initial=0)) for exact in weights]
    of_stage = [upto[rank] for rank in problem.placement]

    def load(stage: int, start: int, stop: int) -> int:
        return of_stage[stage][stop] - of_stage[stage][start]

    return problem.stage_map(evenest(problem.num_layers, problem.num_stages, load))


def evenest(num_layers: int, num_stages: int, load: StageLoad) -> Partition:
    """Minimise, exactly, the largest ``load`` of a stage.

    Among equal partitions the one with the least sum of squared loads wins, so that the other
    stages are even too; then the one whose last stage, then the one before it, and so on, has the
    fewest layers. Dynamic programming, O(stages x layers^2) at worst.
    """
    limit = _bottleneck(num_layers, num_stages, load)
    best: dict[int, _Squares] = {0: (0, (0,))}  # for layers < stop in the stages so far
    for stage in range(num_stages):
        longer = {}
        for stop in _stops(num_layers, num_stages, stage):
            candidates = []
            for start, weight in _within(limit, load, stage, stop, best):
                total, bounds = best[start]
                candidates.append((total + weight * weight, (-stop, *bounds)))
            if candidates:
                longer[stop] = min(candidates)
        best = longer
    _, bounds = best[num_layers]
    return Partition(tuple(pairwise(-bound for bound in reversed(bounds))))


def _bottleneck(num_layers: int, num_stages: int, load: StageLoad) -> float:
    """Return the largest load of a stage, as small as it can be."""
    # No stage of the best division is heavier than the heaviest one of equal numbers of layers.
    equal = pairwise(stage * num_layers // num_stages for stage in range(num_stages + 1))
    limit = max(load(stage, *bounds) for stage, bounds in enumerate(equal))
    least = {0: -math.inf}  # for layers < stop in the stages so far
    for stage in range(num_stages):
        longer = {}
        for stop in _stops(num_layers, num_stages, stage):
            loads = _within(limit, load, stage, stop, least)
            largest = [max(least[start], weight) for start, weight in loads]
            if largest:
                longer[stop] = min(largest)
        least = longer
    return least[num_layers]


def _stops(num_layers: int, num_stages: int, stage: int) -> range:
    """Return where a stage may end, so that it and every other one has a layer."""
    after = num_stages - 1 - stage
    return range(stage + 1 if after else num_layers, num_layers - after + 1)


def _within(
    limit: float, load: StageLoad, stage: int, stop: int, starts: Collection[int]
) -> Iterator[tuple[int, float]]:
    """Yield where a stage that ends at ``stop`` may begin, the last of the ``starts`` first, and
    its load, which is within the limit."""
    for start in sorted(starts, reverse=True):
        if start < stop:
            weight = load(stage, start, stop)
            if weight > limit:
                return
            yield start, weight
