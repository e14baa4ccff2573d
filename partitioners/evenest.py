"""Divide layers evenly: by their number, by their costs, or by any load of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

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

    def least(limit: float, value: Any, extended: Callable[[Any, float, int], Any]) -> Any:
        """Return the least value of all stages whose loads are within the limit."""
        best = {0: value}  # for layers < stop in the stages so far
        for stage in range(num_stages):
            longer = {}
            last = num_layers - (num_stages - 1 - stage)  # no stage is empty
            for stop in range(stage + 1 if last < num_layers else num_layers, last + 1):
                candidates = []
                for start in range(stop - 1, stage - 1, -1):
                    weight = load(stage, start, stop)
                    if weight > limit:
                        break
                    if start in best:
                        candidates.append(extended(best[start], weight, stop))
                if candidates:
                    longer[stop] = min(candidates)
            best = longer
        return best[num_layers]

    def heaviest(value: float, weight: float, stop: int) -> float:
        return max(value, weight)

    def squares(value: _Squares, weight: float, stop: int) -> _Squares:
        total, bounds = value
        return total + weight * weight, (-stop, *bounds)

    # No stage of the best division is heavier than the heaviest one of equal numbers of layers.
    equal = pairwise(stage * num_layers // num_stages for stage in range(num_stages + 1))
    limit = max(load(stage, *bounds) for stage, bounds in enumerate(equal))
    bottleneck = least(limit, -math.inf, heaviest)
    _, bounds = least(bottleneck, (0, (0,)), squares)
    return Partition(tuple(pairwise(-bound for bound in reversed(bounds))))
