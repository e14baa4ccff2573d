"""Put as many layers on every stage, whatever they cost."""

from __future__ import annotations

from shardmlx.partitioners.problem import Problem
from shardmlx.pipeline.stage_map import Partition, StageMap


def uniform(problem: Problem) -> StageMap:
    """Make numbers of layers as even as can be; earlier stages take what is left over."""
    size, left_over = divmod(problem.num_layers, problem.num_stages)
    sizes = (size + (stage < left_over) for stage in range(problem.num_stages))
    return problem.stage_map(Partition.from_sizes(sizes))
