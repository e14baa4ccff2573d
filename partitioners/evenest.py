"""Divide layers evenly: by their number, by their costs, or by any load of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from shardmlx.partitioners.problem import LayerCosts, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

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
    load = exact_load([problem.costs[rank] for rank in problem.placement])
    return problem.stage_map(evenest(problem.num_layers, problem.num_stages, load))


def evenest(num_layers: int, num_stages: int, load: StageLoad) -> Partition:
    """Minimise, exactly, the largest ``load`` of a stage.

    Among equal partitions the one with the least sum of squared loads wins, so that the other
    stages are even too; then the one whose last stage, then the one before it, and so on, has the
    fewest layers. Dynamic programming, O(stages x layers^2) at worst.
    """
    bottleneck = _bottleneck(num_layers, num_stages, load)
    # best[stop]: the least sum for layers < stop, and the bounds of the stages that give it, last
    # first and negated, so that min prefers a late start.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(num_stages):
        longer = {}
        for stop in _stops(num_layers, num_stages, stage):
            candidates = []
            for start in range(stop - 1, stage - 1, -1):
                weight = load(stage, start, stop)
                if weight > bottleneck:
                    break
                if start in best:
                    squares, bounds = best[start]
                    candidates.append((squares + weight * weight, bounds))
            if candidates:
                squares, bounds = min(candidates)
                longer[stop] = squares, (-stop, *bounds)
        best = longer
    _, bounds = best[num_layers]
    return Partition(tuple(pairwise(-bound for bound in reversed(bounds))))


def _bottleneck(num_layers: int, num_stages: int, load: StageLoad) -> float:
    """Return the least possible load of the heaviest stage."""
    best: dict[int, float] = {0: -math.inf}  # for layers < stop in the stages so far
    for stage in range(num_stages):
        longer = {}
        for stop in _stops(num_layers, num_stages, stage):
            least = math.inf
            for start in range(stop - 1, stage - 1, -1):
                weight = load(stage, start, stop)
                if weight >= least:
                    break
                if start in best:
                    least = min(least, max(best[start], weight))
            longer[stop] = least
        best = longer
    return best[num_layers]


def _stops(num_layers: int, num_stages: int, stage: int) -> range:
    """Return where a stage may end so that no stage is empty."""
    last = stage == num_stages - 1
    return range(num_layers if last else stage + 1, num_layers - (num_stages - 1 - stage) + 1)


def exact_load(costs: Sequence[LayerCosts]) -> StageLoad:
    """Return the load of stages whose layers add up; ``costs[stage]`` are those on its rank.

    Floats are fractions of powers of two: scaled to integers, their exact sums make equal stages
    compare equal on every machine.
    """
    weights = {each: _weights(each) for each in set(costs)}
    scale = max(weight.denominator for each in weights.values() for weight in each)
    upto = {
        each: list(accumulate((int(weight * scale) for weight in weights[each]), initial=0))
        for each in weights
    }
    sums = [upto[each] for each in costs]
    return lambda stage, start, stop: sums[stage][stop] - sums[stage][start]


def _weights(costs: LayerCosts) -> list[Fraction]:
    weights = [Fraction(cost) for cost in costs.layers]
    weights[0] += Fraction(costs.embedding)
    weights[-1] += Fraction(costs.head)
    return weights
