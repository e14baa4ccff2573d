"""Find the fastest step on machines of unequal speed, memory and links.

The step is a sum and a maximum. The maximum is searched by branch and bound; for a given one, the
least sum of stage times is found by dynamic programming, stage by stage, over states of three
numbers:

- node: which machines the stages so far have taken, as a count of each kind;
- kind: the kind of the last of them, since the link to the next machine depends on it;
- stop: the layers that those stages hold, 0 to stop.

``least[stage][node, kind, stop]`` is the least sum of the times of the stages before ``stage``,
links between them included. A stage on a machine of some kind leads from each state, by each number
of layers that it may hold, to a state before the next stage.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardmlx.errors import UserError
from shardmlx.partitioners.evenest import last_bounds
from shardmlx.partitioners.memory import DoesNotFitError, does_not_fit, evenly_full
from shardmlx.partitioners.problem import Array, LayerCosts, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

MAX_PLACINGS = 10_240
"""Limit of nodes times kinds for a search of all orders: 10 different machines, 24 machines of four
kinds, or 140 of two."""

_ROUNDING = 1e-12
"""Relative difference below which sums are equal."""

_LOOSE = 1e-9
"""Relative difference by which rounding may make a bound too large."""

Kinds = tuple[tuple[int, ...], ...]
"""The ranks of each kind of machine, in the order in which they are taken."""

Ends = list[list[NDArray[np.intp]]]
"""Ends of the longest stages that fit, by stage, kind of machine, and first layer; 0 where none
does."""


def step_cost(problem: Problem, stage_map: StageMap) -> float:
    """Return the predicted time of one step, in the unit of ``problem.costs``.

    One micro-batch passes through every stage, and its messages there and back; the others
    follow at the pace of the slowest rank: sum + transfers + (m - 1) max. So does what passes
    ``once``.
    """
    busy = [0.0] * problem.pp
    once = 0.0
    for rank, (start, stop) in zip(stage_map.placement, stage_map.partition.ranges, strict=True):
        busy[rank] += problem.costs[rank].total(start, stop)
        if problem.once:
            once += problem.once[rank].total(start, stop)
    links = [problem.round_trip(a, b) for a, b in pairwise(stage_map.placement) if a != b]
    return math.fsum((*busy, *links, once, (problem.microbatches - 1) * max(busy)))


def hetero(problem: Problem) -> StageMap:
    """Minimise ``step_cost``, exactly, over partitions and orders of the machines.

    Every machine runs one stage, whose peak fits its memory (without ``problem.peak``, its
    parameters). Among equal orders the given one wins. With more kinds of machines than
    ``MAX_PLACINGS`` allows, only the given order is tried.

    Raises ``UserError`` if nothing fits, or for several stages a rank.
    """
    try:
        return fastest_order(problem)
    except NoOrderFitsError as error:
        raise error.nearest() from None


def fastest_order(problem: Problem) -> StageMap:
    """Return what ``hetero`` does; ``NoOrderFitsError``, at once, if nothing fits."""
    if problem.pp < problem.num_stages:
        raise UserError(
            f"the partitioner hetero puts one stage on each rank, not {problem.num_stages} stages "
            f"on {problem.pp}",
            "use a schedule with one stage a rank, like 1f1b, or balanced",
        )
    kinds = kinds_of(problem)
    return _fastest(problem, kinds, orders_to_try(problem, kinds))


def fastest_in_order(problem: Problem) -> StageMap:
    """Minimise ``step_cost``, exactly, over partitions alone: machines keep their places, with one
    stage each. ``NoOrderFitsError``, at once, if nothing fits."""
    kinds = kinds_of(problem)
    return _fastest(problem, kinds, (given_order(problem, kinds),))


def _fastest(problem: Problem, kinds: Kinds, tried: Sequence[Orders]) -> StageMap:
    # Much sooner than by the ends of all stages.
    if not _fits_in_large_machines(problem):
        raise NoOrderFitsError(problem)
    ends = _ends(problem, kinds)
    tried = [orders for orders in tried if ends is None or _may_fit(ends, orders)]
    if not tried:
        raise NoOrderFitsError(problem)
    tables = Tables.of(problem, kinds, ends)
    answer: tuple[float, Path] | None = None
    for orders in tried:
        answer = _search(tables, orders, problem.microbatches, answer)
    if answer is None:
        raise NoOrderFitsError(problem)
    _, path = answer
    return problem.stage_map(Partition(tuple(pairwise(path.bounds))), path.placement)


class NoOrderFitsError(DoesNotFitError):
    """Error of a problem that no order of its machines solves. It does not know by how much:
    ``nearest`` does, which takes as long as the search for an order that fits."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("the model fits in no order of the machines", 0, math.inf, "use more")
        self._problem = problem

    def nearest(self) -> DoesNotFitError:
        """Return the error of the order, given or by memory, that lacks the least."""
        problem = self._problem
        by_memory = tuple(sorted(problem.placement, key=lambda rank: -problem.capacity[rank]))
        placed = [replace(problem, placement=order) for order in (problem.placement, by_memory)]
        errors = [does_not_fit(each, evenly_full(each)) for each in placed]
        return min(errors, key=lambda error: error.shortage)


def _search(
    tables: Tables, orders: Orders, microbatches: int, best: tuple[float, Path] | None
) -> tuple[float, Path] | None:
    """Return the fastest step in any of the orders, and its path, unless ``best`` is as fast."""
    times = tables.levels
    repeats = microbatches - 1
    # All micro-batches pass the slowest machine.
    most = math.inf if best is None else best[0] / microbatches
    last = int(np.searchsorted(times, most, side="right")) - 1
    # Ranges of the maximum, from times[low] to times[high], with lower bounds of the step and the
    # sum: the most promising range first.
    ranges = [(-math.inf, 0, last, -math.inf)]
    while ranges:
        bound, low, high, least = heapq.heappop(ranges)
        if high < low or (best is not None and bound >= best[0] * (1 - _ROUNDING)):
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
    given = given_order(problem, kinds)
    nodes = math.prod(len(ranks) + 1 for ranks in kinds)
    if len(kinds) == 1 or len(kinds) * nodes > MAX_PLACINGS:
        return (given,)
    return given, Orders.of([range(len(kinds))] * problem.pp, kinds)


def given_order(problem: Problem, kinds: Kinds) -> Orders:
    """Return the order of a problem's placement alone."""
    kind_of = {rank: kind for kind, ranks in enumerate(kinds) for rank in ranks}
    return Orders.of([[kind_of[rank]] for rank in problem.placement], kinds)


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
    if problem.once and problem.once[a] != problem.once[b]:
        return False
    others = set(range(problem.pp)) - {a, b}
    return all(problem.round_trip(a, each) == problem.round_trip(b, each) for each in others)


class Placing(NamedTuple):
    """A stage on a machine of one kind, which leads from nodes ``sources`` to nodes ``targets``."""

    kind: int
    sources: NDArray[np.intp]
    targets: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """A set of orders of machines, as the paths through a graph.

    ``nodes[s]`` is the number of nodes before stage s, and ``placings[s]`` leads on from them. All
    paths end in one node.
    """

    kinds: Kinds
    nodes: tuple[int, ...]
    placings: tuple[tuple[Placing, ...], ...]

    @classmethod
    def of(cls, allowed: Sequence[Collection[int]], kinds: Kinds) -> Self:
        """Return the orders in which stage s is on a machine of a kind in ``allowed[s]``."""
        nodes = [tuple(0 for _ in kinds)]
        counts = []
        placings = []
        for kinds_here in allowed:
            following: dict[tuple[int, ...], int] = {}
            ways: dict[int, list[tuple[int, int]]] = {kind: [] for kind in kinds_here}
            for source, node in enumerate(nodes):
                for kind in kinds_here:
                    if node[kind] < len(kinds[kind]):
                        target = (*node[:kind], node[kind] + 1, *node[kind + 1 :])
                        number = following.setdefault(target, len(following))
                        ways[kind].append((source, number))
            counts.append(len(nodes))
            placings.append(
                tuple(
                    Placing(kind, *np.array(pairs, np.intp).T)
                    for kind, pairs in ways.items()
                    if pairs
                )
            )
            nodes = list(following)
        return cls(kinds, tuple(counts), tuple(placings))

    @property
    def nodes_after(self) -> tuple[int, ...]:
        """The number of nodes after each stage."""
        return (*self.nodes[1:], 1)

    def placement(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the rank of each stage from its kind; a kind's ranks come in their order."""
        left = [iter(ranks) for ranks in self.kinds]
        return tuple(next(left[kind]) for kind in path)


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A problem as arrays, by kinds of machines.

    A stage is its number of layers and its end, [width, stop]. ``time[kind]`` of a micro-batch and
    ``whole[kind]``, with what passes once, are inf for impossible stages; ``levels`` are the times
    that the slowest stage may take, ascending. ``fits[stage][kind]`` is False for stages without
    room, or None if memory is unknown. ``links`` has the round trip from each kind to each.
    """

    time: Array
    whole: Array
    levels: Array
    links: Array
    fits: list[list[NDArray[np.bool_]]] | None

    @classmethod
    def of(cls, problem: Problem, kinds: Kinds, ends: Ends | None) -> Self:
        """Return the tables of a problem, for machines of these kinds, on which stages fit up to
        their ``ends``."""
        ranks = [members[0] for members in kinds]
        others = [members[-1] for members in kinds]  # within a kind, between two machines of it
        times = np.stack([_times(problem.costs[rank], problem.num_stages) for rank in ranks])
        whole = times
        if problem.once:
            once = [_times(problem.once[rank], problem.num_stages) for rank in ranks]
            whole = times + np.stack(once)
        least = (1 - _LOOSE) * _least_slowest(problem, kinds)
        levels = np.unique(times[np.isfinite(times) & (times >= least)])
        fits = None if ends is None else [[*map(_fits, of_stage)] for of_stage in ends]
        transfer = np.array(problem.transfer)
        links = (transfer + transfer.T)[np.ix_(ranks, others)]
        return cls(times, whole, levels, links, fits)

    def stage_time(self, stage: int, kind: int, limit: float) -> Array:
        """Return whole times [width, stop]; inf where a micro-batch takes over ``limit``, or a
        stage does not fit."""
        allowed = self.time[kind] <= limit
        if self.fits is not None:
            allowed &= self.fits[stage][kind]
        return np.where(allowed, self.whole[kind], math.inf)

    def arriving(self, least: Array, stage: int, kind: int) -> Array:
        """Return ``least[..., kind before, stop]`` plus the round trip to a machine of ``kind``."""
        return least + self.links[:, kind, None] if stage > 0 else least


def _least_slowest(problem: Problem, kinds: Kinds) -> float:
    """Return what the slowest stage takes at least: each machine is as long busy, with those of its
    layers that it computes fastest beside the first machine."""
    layers = range(problem.num_layers)
    by_kind = [problem.costs[members[0]] for members in kinds]
    costs = np.array([[each.total(layer, layer + 1) for layer in layers] for each in by_kind])
    if not costs.all():
        return 0.0
    speeds = (costs[0] / costs).max(axis=1)
    least: float = costs[0].sum() / (speeds @ [*map(len, kinds)])
    return least


@lru_cache(maxsize=64)
def _times(costs: LayerCosts, num_stages: int) -> Array:
    """Return the times of stages by [width, stop]; inf of those that leave others no layer."""
    num_layers = len(costs.layers)
    widest = num_layers - (num_stages - 1)
    table = np.full((num_layers + 1,) * 2, math.inf)
    upto, scale = costs.exact_sums()
    for width in range(1, widest + 1):
        ends = zip(upto[:-width], upto[width:], strict=True)
        table[width, width:] = [(stop - start) / scale for start, stop in ends]
    return table


def _fits(ends: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return which stages have room, by [width, stop], from the ``ends`` of the longest."""
    stops = np.arange(len(ends))
    starts = stops - stops[:, None]
    fits: NDArray[np.bool_] = (starts >= 0) & (stops <= ends[starts])
    return fits


def _ends(problem: Problem, kinds: Kinds) -> Ends | None:
    """Return the ends of the longest stages that fit, or None if memory is unknown."""
    if all(map(math.isinf, problem.capacity)):
        return None
    memories = [problem.capacity[members[0]] for members in kinds]
    ends = []
    for stage in range(problem.num_stages):
        of_stage = {memory: _ends_that_fit(problem, stage, memory) for memory in {*memories}}
        ends.append([of_stage[memory] for memory in memories])
    return ends


def _fits_in_large_machines(problem: Problem) -> bool:
    """Return whether the model would fit if each machine had the memory of the largest one."""
    most = max(problem.capacity)
    held = partial(_least_held, problem, most)
    return last_bounds(problem.num_layers, problem.num_stages, held, most)[-1] == problem.num_layers


def _least_held(problem: Problem, memory: float, stage: int, start: int, stop: int) -> float:
    """Return what a stage holds with these layers or, where that is more than the memory, with some
    more below. From the first trained layer on it passes no gradient down, and may hold less."""
    nbytes = problem.held(stage, start, stop)
    if nbytes > memory and start > problem.first_trained:
        nbytes = min(nbytes, problem.held(stage, problem.first_trained, stop))
    return nbytes


def _may_fit(ends: Ends, orders: Orders) -> bool:
    """Return whether stages reach the end of the model in some order, each of them beginning where
    it ends last. If not, no order fits."""
    reached = np.zeros(1, np.intp)
    for of_stage, placings, nodes in zip(ends, orders.placings, orders.nodes_after, strict=True):
        before, reached = reached, np.zeros(nodes, np.intp)
        for kind, sources, targets in placings:
            farthest = np.maximum.accumulate(of_stage[kind])[before[sources]]
            reached[targets] = np.maximum(reached[targets], farthest)
    return bool(reached[0] == len(ends[0][0]) - 1)


def _ends_that_fit(problem: Problem, stage: int, memory: float) -> NDArray[np.intp]:
    """Return, by the first layer of a stage, where the longest that fits ends; 0 if none does."""
    after = problem.num_stages - 1 - stage
    most = problem.num_layers - after
    ends = np.zeros(problem.num_layers + 1, np.intp)
    # More layers never hold less. So the search goes on where that for the start before has ended.
    stop = stage + bisect_right(
        range(stage + 1, most), memory, key=partial(problem.held, stage, stage)
    )
    for start in range(stage, most) if stage > 0 else [0]:
        first = start + 1 if after else most  # the last stage ends with the model
        stop = max(stop, first - 1)
        while stop < most and problem.held(stage, start, stop + 1) <= memory:
            stop += 1
        while stop >= first and problem.held(stage, start, stop) > memory:
            stop -= 1
        if stop >= first:
            ends[start] = stop
    return ends


class Path(NamedTuple):
    """Stages in order: the sum and the maximum of their times, their ranks, their bounds."""

    total: float
    slowest: float
    placement: tuple[int, ...]
    bounds: tuple[int, ...]


def shortest(tables: Tables, orders: Orders, limit: float) -> Path | None:
    """Return the path of least sum whose stages take ``limit`` at most each; None without one."""
    states = (len(orders.kinds), tables.time.shape[-1])
    least = [np.full((nodes, *states), math.inf) for nodes in (*orders.nodes, 1)]
    least[0][:, :, 0] = 0.0
    for stage, placings in enumerate(orders.placings):
        for placing in placings:
            # Only the kind of the previous machine matters for the link to this one.
            reached = tables.arriving(least[stage][placing.sources], stage, placing.kind)
            stage_time = tables.stage_time(stage, placing.kind, limit)
            least[stage + 1][placing.targets, placing.kind] = _extended(
                reached.min(axis=1), stage_time
            )
    if np.isinf(least[-1][0, :, -1]).all():
        return None
    return _traced_back(tables, orders, limit, least)


def _extended(reached: Array, stage_time: Array) -> Array:
    """Return for every stop the least of reached[:, start] + stage_time[stop - start, stop]."""
    extended = np.full_like(reached, math.inf)
    for width in np.flatnonzero(np.isfinite(stage_time).any(axis=1)):
        candidates = reached[:, :-width] + stage_time[width, width:]
        np.minimum(extended[:, width:], candidates, out=extended[:, width:])
    return extended


def _traced_back(tables: Tables, orders: Orders, limit: float, least: list[Array]) -> Path:
    """Return the path of the least sum in the last states.

    Going back from the last state, each stage finds the state before it, which gives the same sum.
    """
    node = 0
    stop = tables.time.shape[-1] - 1
    kind = int(least[-1][node, :, stop].argmin())
    total = float(least[-1][node, kind, stop])
    kinds = []
    bounds = [stop]
    times = []
    for stage in reversed(range(len(orders.placings))):
        placing = next(each for each in orders.placings[stage] if each.kind == kind)
        node = int(placing.sources[np.flatnonzero(placing.targets == node)[0]])
        # Indices: the kind of the previous machine, the width of this stage (1 ... stop layers).
        reached = tables.arriving(least[stage][node], stage, kind)[:, stop - 1 :: -1]
        stage_time = tables.stage_time(stage, kind, limit)[1 : stop + 1, stop]
        kind_before, narrower = np.unravel_index((reached + stage_time).argmin(), reached.shape)
        kinds.append(kind)
        times.append(float(tables.time[kind, narrower + 1, stop]))
        kind = int(kind_before)
        stop = stop - 1 - int(narrower)
        bounds.append(stop)
    return Path(total, max(times), orders.placement(kinds[::-1]), tuple(bounds[::-1]))
