"""Partitioners by name: those of this folder, and those that other packages bring.

A package brings one by an entry point of the group ``shardmlx.partitioners``::

    [project.entry-points."shardmlx.partitioners"]
    mine = "my_package:my_partitioner"
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from shardmlx.errors import UserError, one_line
from shardmlx.partitioners.evenest import balanced, uniform
from shardmlx.partitioners.hetero import hetero
from shardmlx.partitioners.memory import memory
from shardmlx.partitioners.problem import Partitioner, Problem
from shardmlx.pipeline.stage_map import StageMap

PARTITIONERS: Mapping[str, Partitioner] = MappingProxyType(
    {"balanced": balanced, "uniform": uniform, "memory": memory, "hetero": hetero}
)
"""The partitioners of this folder, by name; no package can take the place of one."""

_GROUP = "shardmlx.partitioners"

_REMEDY = "fix it, or uninstall it"


class PartitionerNames(Collection[str]):
    """The names that an option takes: ``first``, ours, and those of other packages, which are
    looked for where a name is none of ours: that takes some 20 ms."""

    def __init__(self, *first: str) -> None:
        self.own = (*first, *PARTITIONERS)

    def __contains__(self, name: object) -> bool:
        return name in self.own or any(each == name for each in self._others())

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self._others()))

    def __len__(self) -> int:
        return len((*self.own, *self._others()))

    def __bool__(self) -> bool:
        return True

    def _others(self) -> list[str]:
        return sorted(entry_points(group=_GROUP).names - set(self.own))


def get_partitioner(name: str) -> Partitioner:
    """Return a partitioner by name. Raises ``UserError`` unless exactly one package has it, and it
    can be imported; what it returns is checked."""
    if name in PARTITIONERS:
        return PARTITIONERS[name]
    found = tuple(entry_points(group=_GROUP, name=name))
    if not found:
        raise UserError(f"--partitioner {name} is not installed here", "install its package")
    if len(found) > 1:
        packages = " and ".join(sorted(_package(each) for each in found))
        raise UserError(f"--partitioner {name} is in {packages}", "uninstall all but one of them")
    (entry,) = found
    where = f"--partitioner {name} of {_package(entry)} ({entry.value})"
    try:
        partitioner: Partitioner = entry.load()
    except Exception as error:  # another package may raise anything at its import
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{where} cannot be imported: {reason}", _REMEDY) from error
    return _checked(partitioner, where)


def _checked(partitioner: Partitioner, where: str) -> Partitioner:
    """Return a partitioner whose answers are for its problem, or refused by name."""

    @wraps(partitioner)
    def checked(problem: Problem) -> StageMap:
        try:
            answer = partitioner(problem)
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"{where} failed: {reason}", _REMEDY) from error
        if not isinstance(answer, StageMap):
            raise UserError(f"{where} returned {answer!r}, no StageMap", _REMEDY)
        found = answer.partition.num_layers, answer.placement
        if found != (problem.num_layers, problem.placement):
            raise UserError(
                f"{where} divided {found[0]} layers among stages on ranks {list(found[1])}, not "
                f"{problem.num_layers} on {list(problem.placement)}",
                _REMEDY,
            )
        return answer

    return checked


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "an unknown package"
