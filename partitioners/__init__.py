"""Divides layers among pipeline stages: one idea a file.

A partitioner takes a ``Problem`` and returns a ``StageMap``, or raises ``UserError``; these, and
``Partition``, can be imported from here. Other packages bring their own by an entry point
(``installed``).
"""

from __future__ import annotations

from shardmlx.partitioners.evenest import balanced, uniform
from shardmlx.partitioners.hetero import (
    NoOrderFitsError,
    fastest_in_order,
    fastest_order,
    hetero,
    step_cost,
)
from shardmlx.partitioners.installed import PARTITIONERS, PartitionerNames, get_partitioner
from shardmlx.partitioners.memory import DoesNotFitError, memory
from shardmlx.partitioners.problem import LayerCosts, Partitioner, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

__all__ = [
    "PARTITIONERS",
    "DoesNotFitError",
    "LayerCosts",
    "NoOrderFitsError",
    "Partition",
    "Partitioner",
    "PartitionerNames",
    "Problem",
    "StageMap",
    "balanced",
    "fastest_in_order",
    "fastest_order",
    "get_partitioner",
    "hetero",
    "memory",
    "step_cost",
    "uniform",
]
