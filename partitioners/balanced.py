"""The slowest stage as fast as can be: a pipeline runs at its pace."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from shardmlx.partitioners.costs import LayerCosts
from shardmlx.stage_map import Partition


def balanced(costs: LayerCosts, num_stages: int) -> Partition:
    """The exact optimum of max over stages of the stage's cost, embedding and head included.

    Among the optima the one with the least sum of squared stage costs, so that the other
    stages are even too; among those the one whose last stage, then the one before it, and so
    on, has the fewest layers. Dynamic programming, O(stages x layers^2).
    """
    costs.check_stages(num_stages)
    # Floats are fractions of powers of two: on a common scale they are integers, whose exact
    # sums make equal stages compare equal on every machine.
    weights = [Fraction(cost) for cost in costs.layers]
    weights[0] += Fraction(costs.embedding)
    weights[-1] += Fraction(costs.head)
    scale = max(weight.denominator for weight in weights)
    upto = list(accumulate((int(weight * scale) for weight in weights), initial=0))
    return _evenest(upto, num_stages, _bottleneck(upto, num_stages))


def _bottleneck(upto: Sequence[int], num_stages: int) -> int:
    """The least possible cost of the costliest stage; ``upto[i]`` is the cost of layers < i."""
    # best[end]: the bottleneck of layers < end in the stages so far.
    best = dict(enumerate(upto))
    for stages in range(2, num_stages + 1):
        best = {
            end: min(max(best[start], upto[end] - upto[start]) for start in range(stages - 1, end))
            for end in range(stages, len(upto))
        }
    return best[len(upto) - 1]


def _evenest(upto: Sequence[int], num_stages: int, bottleneck: int) -> Partition:
    """The partition with the least sum of squares among those within the bottleneck."""
    # best[end]: that sum for layers < end, and the bounds of the stages that give it, last first
    # and negated, so that min prefers a late start.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for _ in range(num_stages):
        longer = {}
        for end in range(1, len(upto)):
            candidates = [
                (squares + (upto[end] - upto[start]) ** 2, (-end, *bounds))
                for start, (squares, bounds) in best.items()
                if start < end and upto[end] - upto[start] <= bottleneck
            ]
            if candidates:
                longer[end] = min(candidates)
        best = longer
    _, bounds = best[len(upto) - 1]
    return Partition(tuple(pairwise(-bound for bound in reversed(bounds))))
