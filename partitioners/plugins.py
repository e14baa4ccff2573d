"""Partitioners that other packages bring, by the entry point group ``shardmlx.partitioners``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shardmlx.errors import UserError
from shardmlx.partitioners.problem import Partitioner, Problem
from shardmlx.pipeline.stage_map import StageMap

GROUP = "shardmlx.partitioners"


def plugin_names() -> tuple[str, ...]:
    """Return the names that installed packages give their partitioners, sorted."""
    return tuple(sorted(entry_points(group=GROUP).names))


def load_plugin(name: str, names: Sequence[str]) -> Partitioner:
    """Import the partitioner of that name; its answers are checked.

    Raises ``UserError`` if no package or more than one provides it, or if it cannot be imported.
    """
    found = tuple(entry_points(group=GROUP, name=name))
    if not found:
        raise UserError(f"unknown partitioner {name!r}", f"use one of {', '.join(names)}")
    if len(found) > 1:
        packages = " and ".join(sorted(_package(each) for each in found))
        raise UserError(f"partitioner {name!r} is in {packages}", "uninstall all but one of them")
    (entry,) = found
    where = f"partitioner {name!r} of {_package(entry)} ({entry.value})"
    try:
        partitioner = entry.load()
    except Exception as error:  # another package may raise anything at its import
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{where} cannot be imported: {reason}", "mend or uninstall it") from error
    if not callable(partitioner):
        raise UserError(f"{where} is {partitioner!r}, no function", "mend or uninstall it")

    @wraps(partitioner)
    def checked(problem: Problem) -> StageMap:
        return _checked(partitioner(problem), problem, where)

    return checked


def _checked(answer: Any, problem: Problem, where: str) -> StageMap:
    if not isinstance(answer, StageMap):
        raise UserError(f"{where} returned {answer!r}, no StageMap", "mend or uninstall it")
    ours = (problem.num_layers, problem.num_stages, problem.pp)
    theirs = (answer.partition.num_layers, answer.num_stages, answer.pp)
    if theirs != ours:
        layers, stages, ranks = theirs
        raise UserError(
            f"{where} divided {layers} layers into {stages} stages on {ranks} ranks, not "
            f"{ours[0]} into {ours[1]} on {ours[2]}",
            "mend or uninstall it",
        )
    return answer


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "an unknown package"
