"""Make the slowest stage as fast as can be: a pipeline runs at its pace."""

from __future__ import annotations

from shardmlx.partitioners.evenest import evenest, exact_load
from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import StageMap


def balanced(problem: Problem) -> StageMap:
    """Minimise, exactly, the largest cost of a stage on the machine that runs it.

    Embedding and lm_head count. Stages stay in their places. Where a rank has several, every
    stage is as even as can be, not only their sum: a schedule takes turns among them.
    """
    load = exact_load([problem.costs[rank] for rank in problem.placement])
    return problem.stage_map(evenest(problem.num_layers, problem.num_stages, load))
