"""Fill all machines equally: if any division fits, this one does."""

from __future__ import annotations

import math

import numpy as np

from shardmlx.common.formatting import gibibytes, numbers_of
from shardmlx.errors import UserError
from shardmlx.partitioners.evenest import evenest
from shardmlx.partitioners.problem import Array, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap


def memory(problem: Problem) -> StageMap:
    """Minimise, exactly, the largest share of its memory that a machine uses.

    ``UserError`` says how much is lacking if it does not fit. Without ``problem.peak`` only
    parameters count. Several stages of a rank get equal parts of its machine: the optimum is then
    of stages, not of machines.
    """
    for rank, capacity in enumerate(problem.capacity):
        if math.isinf(capacity):
            raise UserError(
                f"the partitioner memory is not told what {problem.name_of(rank)} has",
                "write memory=64GiB, or what it is, into its line of the hostfile, and use "
                "shardmlx plan --hostfile HOSTFILE",
            )
    partition = evenly_full(problem)
    error = does_not_fit(problem, partition)
    if error.shortage > 0:
        raise error
    return problem.stage_map(partition)


def evenly_full(problem: Problem) -> Partition:
    """Return the partition whose fullest machine is least full, even if it does not fit.

    A stage that begins with the first trained layer may hold less than one that begins above it,
    which keeps gradients from I to W. It counts as much as that one, since more layers must not be
    lighter.
    """
    return evenest(problem.num_layers, problem.num_stages, _Fullness(problem))


class _Fullness:
    """The share of its part of a machine that each stage holds."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._above = problem.first_trained + 1
        self._budgets = [
            problem.capacity[rank] / len(problem.stages_of(rank)) for rank in problem.placement
        ]

    def __call__(self, stage: int, start: int, stop: int) -> float:
        held = self._problem.held(stage, start, stop)
        if start < self._above < stop:
            held = max(held, self._problem.held(stage, self._above, stop))
        return held / self._budgets[stage]

    def of(self, stage: int, starts: range, stops: range) -> Array:
        above = self._above
        held = self._problem.held_by_range(stage, starts, stops)
        if starts[0] < above < stops[-1]:
            of_above = self._problem.held_by_range(stage, range(above, above + 1), stops)
            passes = (np.array(starts)[:, None] < above) & (above < np.array(stops))
            held = np.where(passes, np.maximum(held, of_above), held)
        return held / self._budgets[stage]


class DoesNotFitError(UserError):
    """Error whose ``fact`` is the message without remedy; ``rank`` lacks ``shortage`` bytes."""

    def __init__(self, fact: str, rank: int, shortage: float, remedy: str) -> None:
        super().__init__(f"{fact}: {remedy}")
        self.fact = fact
        self.rank = rank
        self.shortage = shortage


def does_not_fit(problem: Problem, partition: Partition) -> DoesNotFitError:
    """Return the error for the rank with least room left by its stages of the best partition."""
    of_rank = [0.0] * problem.pp
    for stage, rank in enumerate(problem.placement):
        of_rank[rank] += problem.held(stage, *partition.ranges[stage])

    def fullness(rank: int) -> tuple[float, float]:
        return of_rank[rank] / problem.capacity[rank], of_rank[rank] - problem.capacity[rank]

    rank = max(range(problem.pp), key=fullness)
    held = of_rank[rank]
    has = problem.capacity[rank]
    where = " and ".join(
        f"stage {stage} (layers {numbers_of(*partition.ranges[stage])})"
        for stage in problem.stages_of(rank)
    )
    return DoesNotFitError(
        f"the model does not fit: at best {problem.name_of(rank)} would hold {gibibytes(held)} of "
        f"its {gibibytes(has)} for {where}, {gibibytes(held - has)} too much",
        rank,
        held - has,
        "quantise the model, use fewer tokens a micro-batch, or more memory",
    )
