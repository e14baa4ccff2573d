"""As many bytes of parameters on every stage: what is to be loaded, and sent, and saved."""

from __future__ import annotations

from shardmlx.partitioners.evenest import evenest, exact_load
from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import StageMap


def parameters(problem: Problem) -> StageMap:
    """The exact optimum of max over stages of the bytes of its parameters."""
    load = exact_load([problem.sizes] * problem.num_stages)
    return problem.stage_map(evenest(problem.num_layers, problem.num_stages, load))
