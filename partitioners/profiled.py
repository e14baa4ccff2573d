"""Make the slowest stage as fast as can be, by the clock."""

from __future__ import annotations

from shardmlx.errors import UserError
from shardmlx.partitioners.balanced import balanced
from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import StageMap


def profiled(problem: Problem) -> StageMap:
    """Balance measured seconds as ``balanced`` does; ``UserError`` where none were measured."""
    if not problem.is_measured:
        raise UserError(
            f"the partitioner profiled divides measured seconds, not modelled {problem.unit}",
            "measure with shardmlx profile, and give --profile FILE to shardmlx plan or "
            "shardmlx train, or use balanced",
        )
    return balanced(problem)
