"""List the orders in which unlike machines can run the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardmlx.partitioners.problem import Problem

MAX_PLACINGS = 10_240
"""Limit of nodes times kinds for a search of all orders: 10 different machines, 24 machines of four
kinds, or 140 of two."""

Kinds = tuple[tuple[int, ...], ...]
"""The ranks of each kind of machine, in the order in which they are taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """A stage on a machine of one kind, which leads from nodes ``sources`` to nodes ``targets``."""

    kind: int
    sources: NDArray[np.intp]
    targets: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """A set of orders, as the paths through a graph.

    A node is the number of machines of each kind that the stages so far have taken. ``nodes[s]`` is
    the number of nodes before stage s, and ``placings[s]`` leads on from them. All paths end in one
    node.
    """

    kinds: Kinds
    nodes: tuple[int, ...]
    placings: tuple[tuple[Placing, ...], ...]

    @classmethod
    def fixed(cls, placement: Sequence[int], kinds: Kinds) -> Orders:
        """Return one order alone: a machine of the kind of ``placement[s]`` runs stage s."""
        kind_of = {rank: kind for kind, ranks in enumerate(kinds) for rank in ranks}
        origin = np.zeros(1, np.intp)
        return cls(
            kinds,
            nodes=(1,) * len(placement),
            placings=tuple((Placing(kind_of[rank], origin, origin),) for rank in placement),
        )

    @classmethod
    def every(cls, kinds: Kinds) -> Orders:
        """Return all orders of all machines; machines of one kind are interchangeable."""
        nodes = [tuple(0 for _ in kinds)]
        counts, placings = [], []
        for _ in range(sum(map(len, kinds))):
            following: dict[tuple[int, ...], int] = {}
            ends: list[tuple[list[int], list[int]]] = [([], []) for _ in kinds]
            for source, node in enumerate(nodes):
                for kind, used in enumerate(node):
                    if used < len(kinds[kind]):
                        target = (*node[:kind], used + 1, *node[kind + 1 :])
                        ends[kind][0].append(source)
                        ends[kind][1].append(following.setdefault(target, len(following)))
            counts.append(len(nodes))
            placings.append(
                tuple(
                    Placing(kind, np.array(sources, np.intp), np.array(targets, np.intp))
                    for kind, (sources, targets) in enumerate(ends)
                    if sources
                )
            )
            nodes = list(following)
        return cls(kinds, tuple(counts), tuple(placings))

    def placement(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the rank of each stage from its kind; a kind's ranks come in their order."""
        left = [iter(ranks) for ranks in self.kinds]
        return tuple(next(left[kind]) for kind in path)


def orders_to_try(problem: Problem, kinds: Kinds) -> tuple[Orders, ...]:
    """Return the given order, then all orders; or two likely good ones, if there are too many.

    Likely good orders have the largest memory first, since early stages hold the most
    micro-batches, or the fastest machine first.
    """
    given = Orders.fixed(problem.placement, kinds)
    if len(kinds) == 1:
        return (given,)
    if len(kinds) * math.prod(len(ranks) + 1 for ranks in kinds) <= MAX_PLACINGS:
        return given, Orders.every(kinds)
    speed = [costs.total(0, problem.num_layers) for costs in problem.costs]
    largest = sorted(problem.placement, key=lambda rank: (-problem.capacity[rank], speed[rank]))
    fastest = sorted(problem.placement, key=lambda rank: speed[rank])
    return given, Orders.fixed(largest, kinds), Orders.fixed(fastest, kinds)


def kinds_of(problem: Problem) -> Kinds:
    """Return the ranks by kind, in the given order: two of a kind are interchangeable."""
    kinds: list[list[int]] = []
    for rank in problem.placement:
        for ranks in kinds:
            if _are_alike(problem, ranks[0], rank):
                ranks.append(rank)
                break
        else:
            kinds.append([rank])
    return tuple(map(tuple, kinds))


def _are_alike(problem: Problem, a: int, b: int) -> bool:
    if problem.costs[a] != problem.costs[b] or problem.capacity[a] != problem.capacity[b]:
        return False
    others = set(range(problem.pp)) - {a, b}
    return all(_round_trip(problem, a, each) == _round_trip(problem, b, each) for each in others)


def _round_trip(problem: Problem, a: int, b: int) -> float:
    return problem.transfer[a][b] + problem.transfer[b][a]
