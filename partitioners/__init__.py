"""How layers are divided into pipeline stages: one idea a file, found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardmlx.errors import UserError
from shardmlx.partitioners.balanced import balanced
from shardmlx.partitioners.costs import LayerCosts, train_costs
from shardmlx.partitioners.uniform import uniform
from shardmlx.stage_map import Partition

Partitioner = Callable[[LayerCosts, int], Partition]
"""(costs, number of stages) -> partition; ``UserError`` for more stages than layers."""

PARTITIONERS: Mapping[str, Partitioner] = MappingProxyType(
    {"balanced": balanced, "uniform": uniform}
)


def get_partitioner(name: str) -> Partitioner:
    """The partitioner of that name; ``UserError`` lists the names."""
    if name not in PARTITIONERS:
        raise UserError(f"unknown partitioner {name!r}: use one of {', '.join(PARTITIONERS)}")
    return PARTITIONERS[name]


__all__ = [
    "PARTITIONERS",
    "LayerCosts",
    "Partitioner",
    "balanced",
    "get_partitioner",
    "train_costs",
    "uniform",
]
