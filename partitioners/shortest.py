"""The least sum of stage times, over layers x machines, where no stage is slower than a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardmlx.partitioners.memory import peak_of
from shardmlx.partitioners.orders import Kinds, Orders
from shardmlx.partitioners.problem import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A problem as arrays, by kinds of machines.

    A stage is its number of layers and its end, [width, stop]. ``time[kind]`` is inf where there
    is no such stage; ``links`` has the round trip from each kind to each. ``peaks[stage]`` is
    bytes, None where nothing is known of memory, and ``capacity[kind]`` what they must fit.
    """

    time: Array
    links: Array
    peaks: Array | None
    capacity: Array

    @classmethod
    def of(cls, problem: Problem, kinds: Kinds) -> Self:
        ranks = [members[0] for members in kinds]
        others = [members[-1] for members in kinds]  # within a kind, between two of it
        layers, widest = problem.num_layers, problem.num_layers - problem.num_stages + 1
        time = np.full((len(ranks), layers + 1, layers + 1), math.inf)
        for kind, rank in enumerate(ranks):
            for stop in range(1, layers + 1):
                for start in range(max(0, stop - widest), stop):
                    time[kind, stop - start, stop] = problem.costs[rank].total(start, stop)
        transfer = np.array(problem.transfer)
        links = (transfer + transfer.T)[np.ix_(ranks, others)]
        return cls(time, links, _peaks(problem), np.array(problem.capacity)[ranks])

    @property
    def num_layers(self) -> int:
        return int(self.time.shape[-1]) - 1

    def stage_time(self, stage: int, kind: int, limit: float) -> Array:
        """[width, stop]; inf where a stage takes more than ``limit``, or does not fit."""
        allowed = self.time[kind] <= limit
        if self.peaks is not None:
            allowed &= self.peaks[stage] <= self.capacity[kind]
        return np.where(allowed, self.time[kind], math.inf)

    def ahead(self, sums: Array, stage: int, kind: int) -> Array:
        """``sums[..., last kind, stop]`` and the round trip to a machine of that kind."""
        return sums + self.links[:, kind, None] if stage > 0 else sums


def _peaks(problem: Problem) -> Array | None:
    """Bytes by [stage, width, stop]; inf where they fit nowhere, or leave others no layers.

    None where nothing is known of memory.
    """
    if all(map(math.isinf, problem.capacity)):
        return None
    peak = peak_of(problem)
    layers, stages = problem.num_layers, problem.num_stages
    largest = max(problem.capacity)
    table = np.full((stages, layers + 1, layers + 1), math.inf)
    for stage in range(stages):
        for stop in range(stage + 1, layers - (stages - 1 - stage) + 1):
            for start in range(stop - 1, stage - 1, -1):
                held = peak(stage, start, stop)
                if held > largest:
                    break  # as it is with any more layers
                table[stage, stop - start, stop] = held
    return table


@dataclass(frozen=True, slots=True)
class Path:
    """Stages in order: the sum and the maximum of their times, their ranks, their bounds."""

    total: float
    slowest: float
    placement: tuple[int, ...]
    bounds: tuple[int, ...]


def shortest(tables: Tables, orders: Orders, limit: float) -> Path | None:
    """The path of least sum whose stages take ``limit`` at most each; None if there is none."""
    layers = tables.num_layers
    # sums[stage][node, kind, stop]: the least sum of all layers < stop before the stage, where
    # the last machine is of that kind.
    sums = [
        np.full((nodes, len(orders.kinds), layers + 1), math.inf) for nodes in (*orders.nodes, 1)
    ]
    sums[0][:, :, 0] = 0.0
    for stage, steps in enumerate(orders.steps):
        for step in steps:
            before = tables.ahead(sums[stage][step.sources], stage, step.kind).min(axis=1)
            table = tables.stage_time(stage, step.kind, limit)
            sums[stage + 1][step.targets, step.kind] = _extended(before, table)
        if np.isinf(sums[stage + 1]).all():
            return None
    if np.isinf(sums[-1][0, :, layers]).all():
        return None
    return _traced_back(tables, orders, limit, sums)


def _extended(before: Array, table: Array) -> Array:
    """The least of before[:, start] + table[stop - start, stop] over start, for every stop."""
    after = np.full_like(before, math.inf)
    for width in np.flatnonzero(np.isfinite(table).any(axis=1)):
        candidates = before[:, :-width] + table[width, width:]
        np.minimum(after[:, width:], candidates, out=after[:, width:])
    return after


def _traced_back(tables: Tables, orders: Orders, limit: float, sums: list[Array]) -> Path:
    """The path that gave the last sum: the one whose sums come out the same again."""
    node, stop = 0, tables.num_layers
    kind = int(sums[-1][node, :, stop].argmin())
    total = float(sums[-1][node, kind, stop])
    kinds, bounds, times = [], [stop], []
    for stage in reversed(range(len(orders.steps))):
        step = next(each for each in orders.steps[stage] if each.kind == kind)
        node = int(step.sources[np.flatnonzero(step.targets == node)[0]])
        before = tables.ahead(sums[stage][node], stage, kind)[:, stop - 1 :: -1]  # by width
        table = tables.stage_time(stage, kind, limit)[1 : stop + 1, stop]
        last, width = np.unravel_index((before + table).argmin(), before.shape)
        kinds.append(kind)
        times.append(float(table[width]))
        kind, stop = int(last), stop - 1 - int(width)
        bounds.append(stop)
    return Path(total, max(times), orders.placement(kinds[::-1]), tuple(bounds[::-1]))
