"""Put as many bytes of parameters on every stage: what is to be loaded, sent and saved."""

from __future__ import annotations

from shardmlx.partitioners.evenest import evenest, exact_load
from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import StageMap


def parameters(problem: Problem) -> StageMap:
    """Minimise, exactly, the largest number of bytes of parameters on a stage."""
    load = exact_load([problem.sizes] * problem.num_stages)
    return problem.stage_map(evenest(problem.num_layers, problem.num_stages, load))
