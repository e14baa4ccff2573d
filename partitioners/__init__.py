"""Divides layers among pipeline stages: one idea a file.

A partitioner takes a ``Problem`` and returns a ``StageMap``, or raises ``UserError``; these, and
``Partition``, can be imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardmlx.partitioners.evenest import balanced, uniform
from shardmlx.partitioners.hetero import NoOrderFitsError, fastest_order, hetero, step_cost
from shardmlx.partitioners.memory import DoesNotFitError, memory
from shardmlx.partitioners.problem import LayerCosts, Partitioner, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

PARTITIONERS: Mapping[str, Partitioner] = MappingProxyType(
    {"balanced": balanced, "uniform": uniform, "memory": memory, "hetero": hetero}
)
"""Partitioners by name."""

__all__ = [
    "PARTITIONERS",
    "DoesNotFitError",
    "LayerCosts",
    "NoOrderFitsError",
    "Partition",
    "Partitioner",
    "Problem",
    "StageMap",
    "balanced",
    "fastest_order",
    "hetero",
    "memory",
    "step_cost",
    "uniform",
]
