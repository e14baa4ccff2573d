"""Divides layers among pipeline stages: one idea a file, found by name.

Partitioners of other packages are found by their entry point group ``shardmlx.partitioners``::

    [project.entry-points."shardmlx.partitioners"]
    mine = "my_package.my_module:my_partitioner"

A partitioner takes a ``Problem`` and returns a ``StageMap``, or raises ``UserError``; these, and
``Partition``, can be imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from shardmlx.errors import UserError, one_line
from shardmlx.partitioners.evenest import balanced, uniform
from shardmlx.partitioners.hetero import hetero, step_cost
from shardmlx.partitioners.memory import DoesNotFitError, memory
from shardmlx.partitioners.problem import LayerCosts, Partitioner, Problem
from shardmlx.pipeline.stage_map import Partition, StageMap

PARTITIONERS: Mapping[str, Partitioner] = MappingProxyType(
    {"balanced": balanced, "uniform": uniform, "memory": memory, "hetero": hetero}
)
"""Partitioners of shardmlx; a plug-in of the same name is ignored."""

_GROUP = "shardmlx.partitioners"


def partitioner_names() -> tuple[str, ...]:
    """Return the names of ours, then of other packages', without importing any."""
    others = sorted(entry_points(group=_GROUP).names - PARTITIONERS.keys())
    return *PARTITIONERS, *others


def get_partitioner(name: str) -> Partitioner:
    """Return a partitioner by name; ``UserError`` unless one package has it, and it imports.
    Answers of another package's are checked."""
    if name in PARTITIONERS:
        return PARTITIONERS[name]
    found = tuple(entry_points(group=_GROUP, name=name))
    if not found:
        known = ", ".join(partitioner_names())
        raise UserError(f"unknown partitioner {name!r}", f"use one of {known}")
    if len(found) > 1:
        packages = " and ".join(sorted(_package(each) for each in found))
        raise UserError(f"partitioner {name!r} is in {packages}", "uninstall all but one of them")
    (entry,) = found
    where = f"partitioner {name!r} of {_package(entry)} ({entry.value})"
    try:
        partitioner = entry.load()
    except Exception as error:  # another package may raise anything at its import
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{where} cannot be imported: {reason}", "mend or uninstall it") from error

    @wraps(partitioner)
    def checked(problem: Problem) -> StageMap:
        answer = partitioner(problem)
        if not isinstance(answer, StageMap):
            raise UserError(f"{where} returned {answer!r}, no StageMap", "mend or uninstall it")
        layers, stages, ranks = answer.partition.num_layers, answer.num_stages, answer.pp
        wanted = problem.num_layers, problem.num_stages, problem.pp
        if (layers, stages, ranks) != wanted:
            raise UserError(
                f"{where} divided {layers} layers into {stages} stages on {ranks} ranks, not "
                f"{wanted[0]} into {wanted[1]} on {wanted[2]}",
                "mend or uninstall it",
            )
        return answer

    return checked


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "an unknown package"


__all__ = [
    "PARTITIONERS",
    "DoesNotFitError",
    "LayerCosts",
    "Partition",
    "Partitioner",
    "Problem",
    "StageMap",
    "balanced",
    "get_partitioner",
    "hetero",
    "memory",
    "partitioner_names",
    "step_cost",
    "uniform",
]
