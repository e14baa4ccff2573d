"""In which orders unlike machines can run the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardmlx.partitioners.problem import Problem

MAX_NODES = 2048
"""Above it the orders are too many to search: 11 machines that are all different, or 22 of four
kinds."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A stage on a machine of one kind: from nodes ``sources`` to nodes ``targets``."""

    kind: int
    sources: NDArray[np.intp]
    targets: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """A set of orders, as the paths through a graph.

    A node says how many machines of each kind the stages so far have taken. ``kinds`` has the
    ranks of each kind; ``nodes[s]`` is the number of nodes before stage s, and ``steps[s]`` leads
    on from them. All paths end in one node.
    """

    kinds: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    steps: tuple[tuple[Step, ...], ...]

    @classmethod
    def fixed(cls, placement: Sequence[int]) -> Orders:
        """One order alone: ``placement[s]`` runs stage s."""
        origin = np.zeros(1, np.intp)
        return cls(
            kinds=tuple((rank,) for rank in range(len(placement))),
            nodes=(1,) * len(placement),
            steps=tuple((Step(rank, origin, origin),) for rank in placement),
        )

    @classmethod
    def every(cls, kinds: tuple[tuple[int, ...], ...]) -> Orders:
        """All orders of all machines; those of one kind are interchangeable."""
        nodes = [tuple(0 for _ in kinds)]
        counts, steps = [], []
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
            steps.append(
                tuple(
                    Step(kind, np.array(sources, np.intp), np.array(targets, np.intp))
                    for kind, (sources, targets) in enumerate(ends)
                    if sources
                )
            )
            nodes = list(following)
        return cls(kinds, tuple(counts), tuple(steps))

    def placement(self, path: Sequence[int]) -> tuple[int, ...]:
        """The rank of each stage from the kind of each; a kind's ranks come in ascending order."""
        left = [iter(ranks) for ranks in self.kinds]
        return tuple(next(left[kind]) for kind in path)


def orders_to_try(problem: Problem) -> tuple[Orders, ...]:
    """The given order, then all orders; or, where they are too many, two that are likely good.

    Those have the largest memory first, since early stages hold the most micro-batches, and the
    fastest machine first.
    """
    kinds = _kinds(problem)
    given = Orders.fixed(problem.placement)
    if len(kinds) == 1:
        return (given,)
    if math.prod(len(ranks) + 1 for ranks in kinds) <= MAX_NODES:
        return given, Orders.every(kinds)
    speed = [costs.total(0, problem.num_layers) for costs in problem.costs]
    largest = sorted(problem.placement, key=lambda rank: (-problem.capacity[rank], speed[rank]))
    fastest = sorted(problem.placement, key=lambda rank: speed[rank])
    return given, Orders.fixed(largest), Orders.fixed(fastest)


def _kinds(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The ranks by what they can do: two of a kind may change places, and nothing changes."""
    kinds: list[list[int]] = []
    for rank in range(problem.pp):
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
