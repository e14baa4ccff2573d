"""Divide layers evenly: by their number, by their costs, or by any load of a stage."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import lt
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

HALVINGS = 6
"""Halvings of the largest load of equal stages, on the way to one that is hardly too large."""


StageLoad = Callable[[int, int, int], float]
"""Load of a stage with layers start to stop, by (stage, start, stop); it grows with the layers."""


class StageLoads(Protocol):
    """Loads of stages, which grow with the layers."""

    def __call__(self, stage: int, start: int, stop: int) -> float:
        """Return the load of a stage with layers ``start`` to ``stop``."""

    def of(self, stage: int, starts: range, stops: range) -> NDArray[Any]:
        """Return the loads of a stage by [start, stop]: any where it has no layer."""


def uniform(problem: Problem) -> StageMap:
    """Make numbers of layers as even as possible; earlier stages take the remainder."""
    upto = np.arange(problem.num_layers + 1)
    even = evenest(problem.num_layers, problem.num_stages, _Sums([upto] * problem.num_stages))
    return problem.stage_map(even)


def balanced(problem: Problem) -> StageMap:
    """Minimise, exactly, the largest cost of a stage on the machine that runs it.

    Embedding and lm_head count. Stages stay in their places. The stages of a rank are balanced one
    by one, not by their sum, since a schedule alternates between them.
    """
    # Exact sums make equal stages compare equal on every machine.
    exact = {costs: costs.exact_sums() for costs in {*problem.costs}}
    scale = max(own for _, own in exact.values())
    sums = {
        costs: np.array([each * (scale // own) for each in upto], object)
        for costs, (upto, own) in exact.items()
    }
    loads = _Sums([sums[problem.costs[rank]] for rank in problem.placement])
    return problem.stage_map(evenest(problem.num_layers, problem.num_stages, loads))


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Loads that are sums over layers: ``upto[stage]`` has those of the layers below each."""

    upto: Sequence[NDArray[Any]]

    def __call__(self, stage: int, start: int, stop: int) -> float:
        upto = self.upto[stage]
        load: float = upto[stop] - upto[start]
        return load

    def of(self, stage: int, starts: range, stops: range) -> NDArray[Any]:
        upto = self.upto[stage]
        loads: NDArray[Any] = upto[stops] - upto[starts][:, None]
        return loads


def evenest(num_layers: int, num_stages: int, load: StageLoads) -> Partition:
    """Minimise, exactly, the largest ``load`` of a stage.

    Among equal partitions the one with the least sum of squared loads wins, so that the other
    stages are even too; then the one whose last stage, then the one before it, and so on, has the
    fewest layers. Dynamic programming over the bounds that no good partition exceeds, which are few
    by a good partition that is known.
    """
    known = _good_bounds(num_layers, num_stages, load)
    limit = _largest(known, load)
    last = last_bounds(num_layers, num_stages, load, limit)
    first = _first_bounds(num_layers, num_stages, load, limit)
    # A load that does not quite grow with the layers leaves the known partition in.
    each = zip(first, known, last, strict=True)
    windows = [range(min(bounds), max(bounds) + 1) for bounds in each]

    loads = []
    allowed = []
    for stage, (starts, stops) in enumerate(pairwise(windows)):
        of_stage = load.of(stage, starts, stops)
        has_layers = np.array(starts)[:, None] < np.array(stops)
        loads.append(of_stage)
        allowed.append(has_layers & (of_stage <= limit))
    begins = np.array(windows[0]) == 0
    limit = _bottleneck(loads, allowed, begins)
    reached = begins
    # The least sum of squares for each number of layers in the stages so far.
    best = np.zeros(len(begins), loads[0].dtype)
    origins = []
    for of_stage, may in zip(loads, allowed, strict=True):
        leads_on = may & (of_stage <= limit) & reached[:, None]
        squares = np.where(leads_on, best[:, None] + of_stage * of_stage, math.inf)
        # The last of equal sums has stages that start late.
        origin = len(squares) - 1 - squares[::-1].argmin(axis=0)
        reached = leads_on.any(axis=0)
        best = np.where(reached, squares[origin, range(len(origin))], 0)
        origins.append(origin)
    return _traced_back(windows, origins)


def _traced_back(windows: Sequence[range], origins: Sequence[NDArray[np.intp]]) -> Partition:
    """Return the partition whose last stage ends last; ``origins`` say by the place of an end in
    its window at which place of the window before it the stage starts."""
    place = len(windows[-1]) - 1
    bounds = [windows[-1][place]]
    for window, origin in zip(windows[-2::-1], reversed(origins), strict=True):
        place = int(origin[place])
        bounds.append(window[place])
    return Partition(tuple(pairwise(reversed(bounds))))


def _good_bounds(num_layers: int, num_stages: int, load: StageLoad) -> list[int]:
    """Return the bounds of stages whose largest load is little more than it must be."""
    known = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    most = _largest(known, load)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS if most else 0):
        share = (low + high) / 2
        bounds = last_bounds(num_layers, num_stages, partial(_share, load, most), share)
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


def last_bounds(num_layers: int, num_stages: int, load: StageLoad, limit: float) -> list[int]:
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


def _bottleneck(
    loads: Sequence[NDArray[Any]], allowed: Sequence[NDArray[np.bool_]], begins: NDArray[np.bool_]
) -> float:
    """Return the largest load of a stage, as small as it can be with the allowed ones."""
    # The least for each number of layers in the stages so far.
    least: NDArray[Any] = np.where(begins, -math.inf, math.inf)
    for of_stage, may in zip(loads, allowed, strict=True):
        largest = np.maximum(least[:, None], of_stage)
        least = np.where(may, largest, math.inf).min(axis=0)
    bottleneck: float = least[-1]
    return bottleneck
