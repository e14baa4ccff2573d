"""Every machine as full as the others: what fits at all, fits so."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardmlx.common.formatting import gibibytes
from shardmlx.errors import UserError
from shardmlx.partitioners.evenest import evenest
from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import Partition, StageMap


def memory(problem: Problem) -> StageMap:
    """The exact optimum of max over stages of peak bytes / bytes that the machine has.

    ``UserError`` says by how much when that does not fit. Without ``problem.peak`` the parameters
    alone are weighed. Where a rank has several stages, each has an equal part of its machine:
    then the optimum is that of stages, not of machines.
    """
    for rank, capacity in enumerate(problem.capacity):
        if math.isinf(capacity):
            raise UserError(
                f"the partitioner memory is not told what {problem.name_of(rank)} has: write "
                "memory=64GiB, or what it is, into its line of the hostfile, and use "
                "python -m shardmlx.plan --hosts HOSTFILE"
            )
    partition = evenly_full(problem)
    rank, held = fullest(problem, partition)
    if held > problem.capacity[rank]:
        raise does_not_fit(problem, partition)
    return problem.stage_map(partition)


def evenly_full(problem: Problem) -> Partition:
    """The partition whose fullest machine is least full, whether it fits or not."""
    peak = peak_of(problem)
    budgets = [problem.capacity[rank] / len(problem.stages_of(rank)) for rank in problem.placement]
    return evenest(
        problem.num_layers,
        problem.num_stages,
        lambda stage, start, stop: peak(stage, start, stop) / budgets[stage],
    )


def peak_of(problem: Problem) -> Callable[[int, int, int], float]:
    """``problem.peak``, or at least the parameters."""
    return problem.peak or (lambda stage, start, stop: problem.sizes.total(start, stop))


def fullest(problem: Problem, partition: Partition) -> tuple[int, float]:
    """The rank that has least room for what its stages hold, and the bytes that they hold."""
    peak = peak_of(problem)
    held = [0.0] * problem.pp
    for stage, (rank, (start, stop)) in enumerate(
        zip(problem.placement, partition.ranges, strict=True)
    ):
        held[rank] += peak(stage, start, stop)
    has = problem.capacity
    rank = max(range(problem.pp), key=lambda each: (held[each] / has[each], held[each] - has[each]))
    return rank, held[rank]


class DoesNotFitError(UserError):
    """``fact`` is the message without its remedy, ``shortage`` the bytes that ``rank`` lacks."""

    def __init__(self, fact: str, rank: int, shortage: float, remedy: str) -> None:
        super().__init__(f"{fact}: {remedy}")
        self.fact = fact
        self.rank = rank
        self.shortage = shortage


def does_not_fit(problem: Problem, partition: Partition) -> DoesNotFitError:
    """What to say of the fullest machine of a partition that is the best of all."""
    rank, held = fullest(problem, partition)
    has = problem.capacity[rank]
    ranges = [partition.ranges[stage] for stage in problem.stages_of(rank)]
    where = " and ".join(
        f"stage {stage} ({_layers(start, stop)})"
        for stage, (start, stop) in zip(problem.stages_of(rank), ranges, strict=True)
    )
    more = "a machine with more memory" if _is_least(ranges) else "more machines"
    return DoesNotFitError(
        f"the model does not fit: at best {problem.name_of(rank)} would hold {gibibytes(held)} of "
        f"its {gibibytes(has)} for {where}, {gibibytes(held - has)} too much",
        rank,
        held - has,
        f"quantise the model, use fewer tokens a micro-batch, or {more}",
    )


def _layers(start: int, stop: int) -> str:
    return f"layer {start}" if stop == start + 1 else f"layers {start}-{stop - 1}"


def _is_least(ranges: list[tuple[int, int]]) -> bool:
    """Whether no stage can give away a layer."""
    return all(stop == start + 1 for start, stop in ranges)
