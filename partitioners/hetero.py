"""Find the fastest step on machines of unequal speed, memory and links."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from shardmlx.errors import UserError
from shardmlx.partitioners.memory import DoesNotFitError, does_not_fit, evenly_full
from shardmlx.partitioners.problem import Problem
from shardmlx.partitioners.shortest import Kinds, Orders, Path, Tables, shortest
from shardmlx.pipeline.stage_map import Partition, StageMap

MAX_PLACINGS = 10_240
"""Limit of nodes times kinds for a search of all orders: 10 different machines, 24 machines of four
kinds, or 140 of two."""

_ROUNDING = 1e-12
"""Relative difference below which sums are equal."""


def step_cost(problem: Problem, stage_map: StageMap) -> float:
    """Return the predicted time of one step, in the unit of ``problem.costs``.

    One micro-batch passes through every stage, and its messages there and back; the others
    follow at the pace of the slowest rank: sum + transfers + (m - 1) max.
    """
    busy = [0.0] * problem.pp
    for rank, (start, stop) in zip(stage_map.placement, stage_map.partition.ranges, strict=True):
        busy[rank] += problem.costs[rank].total(start, stop)
    links = [problem.round_trip(a, b) for a, b in pairwise(stage_map.placement) if a != b]
    return math.fsum((*busy, *links, (problem.microbatches - 1) * max(busy)))


def hetero(problem: Problem) -> StageMap:
    """Minimise ``step_cost``, exactly, over partitions and orders of the machines.

    Every machine runs one stage, whose peak fits its memory (without ``problem.peak``, its
    parameters). Among equal orders the given one wins. With more kinds of machines than
    ``MAX_PLACINGS`` allows, only the given order is tried.

    The step is a sum and a maximum. For a given maximum the least sum is a shortest path over
    layers x machines; the maximum itself is searched by branch and bound. Raises ``UserError`` if
    nothing fits, or for several stages a rank.
    """
    if problem.pp < problem.num_stages:
        raise UserError(
            f"the partitioner hetero puts one stage on each rank, not {problem.num_stages} stages "
            f"on {problem.pp}",
            "use a schedule with one stage a rank, like 1f1b, or balanced",
        )
    kinds = kinds_of(problem)
    tables = Tables.of(problem, kinds)
    answer: tuple[float, Path] | None = None
    for orders in orders_to_try(problem, kinds):
        answer = _search(tables, orders, problem.microbatches, answer)
    if answer is None:
        raise NoOrderFitsError(problem)
    _, path = answer
    return problem.stage_map(Partition(tuple(pairwise(path.bounds))), path.placement)


class NoOrderFitsError(DoesNotFitError):
    """Error of the order, given or by memory, that lacks the least.

    That order is found when a field or the message is asked for: it takes as long as the search for
    one that fits, and a choice of many ways shows one error at most.
    """

    def __init__(self, problem: Problem) -> None:
        self._unsolved = problem

    @cached_property
    def _nearest(self) -> DoesNotFitError:
        problem = self._unsolved
        by_memory = tuple(sorted(problem.placement, key=lambda rank: -problem.capacity[rank]))
        placed = [replace(problem, placement=order) for order in (problem.placement, by_memory)]
        errors = [does_not_fit(each, evenly_full(each)) for each in placed]
        return min(errors, key=lambda error: error.shortage)

    def __getattr__(self, field: str) -> Any:
        return getattr(self._nearest, field)

    def __str__(self) -> str:
        return str(self._nearest)


def _search(
    tables: Tables, orders: Orders, microbatches: int, best: tuple[float, Path] | None
) -> tuple[float, Path] | None:
    """Return the fastest step in any of the orders, and its path, unless ``best`` is as fast."""
    times = np.unique(tables.time[np.isfinite(tables.time)])
    repeats = microbatches - 1
    # Ranges of the maximum, from times[low] to times[high], with lower bounds of the step and the
    # sum: the most promising range first.
    ranges = [(-math.inf, 0, len(times) - 1, -math.inf)]
    while ranges:
        bound, low, high, least = heapq.heappop(ranges)
        if best is not None and bound >= best[0] * (1 - _ROUNDING):
            break
        # The whole range at first, since that bounds the sum.
        middle = high if math.isinf(least) else (low + high) // 2
        path = shortest(tables, orders, times[middle])
        parts = [(middle + 1, high, least)]
        if path is not None:
            step = path.total + repeats * path.slowest
            if best is None or step < best[0] * (1 - _ROUNDING):
                best = step, path
            # No maximum between the path's and the middle has a smaller sum.
            below = int(np.searchsorted(times, path.slowest)) - 1
            parts.append((low, below, path.total))
        for start, end, total in parts:
            if start <= end:
                heapq.heappush(ranges, (total + repeats * times[start], start, end, total))
    return best


def orders_to_try(problem: Problem, kinds: Kinds) -> tuple[Orders, ...]:
    """Return the given order, then all orders unless there are too many."""
    kind_of = {rank: kind for kind, ranks in enumerate(kinds) for rank in ranks}
    given = Orders.of([[kind_of[rank]] for rank in problem.placement], kinds)
    nodes = math.prod(len(ranks) + 1 for ranks in kinds)
    if len(kinds) == 1 or len(kinds) * nodes > MAX_PLACINGS:
        return (given,)
    return given, Orders.of([range(len(kinds))] * problem.pp, kinds)


def kinds_of(problem: Problem) -> Kinds:
    """Return the ranks by kind, in the given order: two of a kind are interchangeable."""
    kinds: list[list[int]] = []
    for rank in problem.placement:
        known = next((ranks for ranks in kinds if _are_alike(problem, ranks[0], rank)), None)
        if known is None:
            kinds.append([rank])
        else:
            known.append(rank)
    return tuple(map(tuple, kinds))


def _are_alike(problem: Problem, a: int, b: int) -> bool:
    if problem.costs[a] != problem.costs[b] or problem.capacity[a] != problem.capacity[b]:
        return False
    others = set(range(problem.pp)) - {a, b}
    return all(problem.round_trip(a, each) == problem.round_trip(b, each) for each in others)
