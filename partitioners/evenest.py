"""Divide layers evenly: by their number, by their costs, or by any load of a stage."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from operator import lt

from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

HALVINGS = 6
"""Halvings of the largest load of equal stages, on the way to one that is hardly too large."""

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
    fewest layers. Dynamic programming over the bounds that no good partition exceeds, which are few
    by a good partition that is known.
    """
    known = _good_bounds(num_layers, num_stages, load)
    limit = _largest(known, load)
    last = _last_bounds(num_layers, num_stages, load, limit)
    first = _first_bounds(num_layers, num_stages, load, limit)
    # A load that does not quite grow with the layers leaves the known partition in.
    each = zip(first, known, last, strict=True)
    windows = [range(min(bounds), max(bounds) + 1) for bounds in each]

    limit = _bottleneck(windows, load, limit)
    best: dict[int, _Squares] = {0: (0, (0,))}  # for layers < stop in the stages so far
    for stage, stops in enumerate(windows[1:]):
        longer = {}
        for stop in stops:
            candidates = []
            for start, weight in _within(limit, load, stage, stop, best):
                total, bounds = best[start]
                candidates.append((total + weight * weight, (-stop, *bounds)))
            if candidates:
                longer[stop] = min(candidates)
        best = longer
    _, bounds = best[num_layers]
    return Partition(tuple(pairwise(-bound for bound in reversed(bounds))))


def _good_bounds(num_layers: int, num_stages: int, load: StageLoad) -> list[int]:
    """Return the bounds of stages whose largest load is little more than it must be."""
    known = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    most = _largest(known, load)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS if most else 0):
        share = (low + high) / 2
        bounds = _last_bounds(num_layers, num_stages, partial(_share, load, most), share)
        if bounds[-1] == num_layers and all(map(lt, bounds, bounds[1:])):
            known = bounds
            high = share
        else:
            low = share
    return known


def _share(load: StageLoad, most: float, stage: int, start: int, stop: int) -> float:
    return load(stage, start, stop) / most


def _largest(bounds: Sequence[int], load: StageLoad) -> float:
    return max(load(stage, *ends) for stage, ends in enumerate(pairwise(bounds)))


def _last_bounds(num_layers: int, num_stages: int, load: StageLoad, limit: float) -> list[int]:
    """Return where the stages end at most, in a partition whose loads are within the limit."""
    bounds = [0]
    for stage in range(num_stages):
        stops = range(bounds[-1] + 1, num_layers - (num_stages - 1 - stage) + 1)
        fitting = bisect_right(stops, limit, key=partial(load, stage, bounds[-1]))
        bounds.append(bounds[-1] + fitting)
    return bounds


def _first_bounds(num_layers: int, num_stages: int, load: StageLoad, limit: float) -> list[int]:
    """Return where the stages begin at least, in a partition whose loads are within the limit."""
    bounds = [num_layers]
    for stage in reversed(range(num_stages)):
        starts = range(bounds[-1] - 1, stage - 1, -1)
        fitting = bisect_right(starts, limit, key=partial(_load_from, load, stage, bounds[-1]))
        bounds.append(bounds[-1] - fitting)
    return bounds[::-1]


def _load_from(load: StageLoad, stage: int, stop: int, start: int) -> float:
    return load(stage, start, stop)


def _bottleneck(windows: Sequence[range], load: StageLoad, limit: float) -> float:
    """Return the largest load of a stage, as small as it can be; one within the limit is."""
    least = {0: -math.inf}  # for layers < stop in the stages so far
    for stage, stops in enumerate(windows[1:]):
        longer = {}
        for stop in stops:
            loads = _within(limit, load, stage, stop, least)
            largest = [max(least[start], weight) for start, weight in loads]
            if largest:
                longer[stop] = min(largest)
        least = longer
    return least[windows[-1][-1]]


def _within(
    limit: float, load: StageLoad, stage: int, stop: int, starts: Iterable[int]
) -> Iterator[tuple[int, float]]:
    """Yield where a stage that ends at ``stop`` may begin, of the ``starts``, and its load, which
    is within the limit."""
    for start in starts:
        if start < stop:
            weight = load(stage, start, stop)
            if weight <= limit:
                yield start, weight
