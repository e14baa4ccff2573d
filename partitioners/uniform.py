"""As many layers on every stage, whatever they cost."""

from __future__ import annotations

from shardmlx.partitioners.costs import LayerCosts
from shardmlx.stage_map import Partition


def uniform(costs: LayerCosts, num_stages: int) -> Partition:
    """Numbers of layers as even as can be; earlier stages take what is left over."""
    costs.check_stages(num_stages)
    size, left_over = divmod(len(costs.layers), num_stages)
    return Partition.from_sizes(size + (stage < left_over) for stage in range(num_stages))
