"""Divides layers among pipeline stages: one idea a file, found by name.

Partitioners of other packages are found by their entry point group ``shardmlx.partitioners``::

    [project.entry-points."shardmlx.partitioners"]
    mine = "my_package.my_module:my_partitioner"

A partitioner takes a ``Problem`` and returns a ``StageMap``, or raises ``UserError``; these, and
``Partition``, can be imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardmlx.partitioners.evenest import balanced, uniform
from shardmlx.partitioners.hetero import hetero, step_cost
from shardmlx.partitioners.memory import DoesNotFitError, memory
from shardmlx.partitioners.plugins import load_plugin, plugin_names
from shardmlx.partitioners.problem import LayerCosts, Partitioner, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

PARTITIONERS: Mapping[str, Partitioner] = MappingProxyType(
    {"balanced": balanced, "uniform": uniform, "memory": memory, "hetero": hetero}
)
"""Partitioners of shardmlx; a plug-in of the same name is ignored."""

_INSTEAD = {"profiled": "balanced, with --profile FILE", "parameters": "balanced or memory"}


def partitioner_names() -> tuple[str, ...]:
    """Return the names of ours, then of other packages', without importing any."""
    return *PARTITIONERS, *(name for name in plugin_names() if name not in PARTITIONERS)


def check_name(name: str) -> str:
    """Return the name of a partitioner; ``ValueError`` says what to give in place of a former."""
    if name in _INSTEAD and name not in plugin_names():
        raise ValueError(f"give {_INSTEAD[name]}")
    return name


def get_partitioner(name: str) -> Partitioner:
    """Return the partitioner of that name; ``UserError`` lists the names, or names the fault."""
    return PARTITIONERS[name] if name in PARTITIONERS else load_plugin(name, partitioner_names())


__all__ = [
    "PARTITIONERS",
    "DoesNotFitError",
    "LayerCosts",
    "Partition",
    "Partitioner",
    "Problem",
    "StageMap",
    "balanced",
    "check_name",
    "get_partitioner",
    "hetero",
    "memory",
    "partitioner_names",
    "step_cost",
    "uniform",
]
