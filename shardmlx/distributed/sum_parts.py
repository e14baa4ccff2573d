"""The owners of the parts of a sum, and the ranks that stand on one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Levels:
    """The groups in which a rank sums in two levels: ``inside`` its host, then ``between`` hosts,
    with the members in the same ``place``.

    ``places`` are the members of the group in each place, as indices into the group.
    """

    inside: tuple[int, ...]
    between: tuple[int, ...]
    place: int
    places: tuple[tuple[int, ...], ...]


def levels_of(rank: int, group: Sequence[int], hosts: Sequence[str]) -> Levels | None:
    """Return the levels of a group of world ranks on ``hosts[rank]``.

    None for a single host, hosts of one member each, or hosts with unequal numbers of members.
    """
    on_host: dict[str, list[int]] = {}
    for member, each in enumerate(group):
        on_host.setdefault(hosts[each], []).append(member)
    members = list(on_host.values())
    if len(members) == 1 or len(members[0]) == 1 or len({len(each) for each in members}) > 1:
        return None
    places = tuple(zip(*members, strict=True))
    inside = on_host[hosts[rank]]
    place = inside.index(group.index(rank))
    return Levels(
        inside=tuple(group[member] for member in inside),
        between=tuple(group[member] for member in places[place]),
        place=place,
        places=places,
    )


def equal_parts(size: int, members: int) -> list[int]:
    """Return the ends of nearly equal parts of ``size`` elements: 0, ..., size."""
    return [size * member // members for member in range(members + 1)]
