"""Divide weights among replicas: each has one owner."""

from __future__ import annotations

from collections.abc import Mapping


def owners(sizes: Mapping[str, int], members: int) -> dict[str, int]:
    """Divide weights of so many elements, or bytes, among ``members``, in nearly equal parts.

    Weights that stand together go to all in the same proportion, so that all links are busy while
    a few layers are summed or gathered. Only the few that are large by themselves come first.
    """
    share = sum(sizes.values()) / members
    quota = [share] * members
    found: dict[str, int] = {}
    large = sorted((n for n in sizes if sizes[n] > share / 4), key=lambda n: -sizes[n])
    for name in large:
        found[name] = max(range(members), key=lambda member: quota[member])
        quota[found[name]] -= sizes[name]
    taken = [0.0] * members
    room = [max(each, 1.0) for each in quota]
    for name, size in sizes.items():
        if name not in found:
            member = min(range(members), key=lambda each: (taken[each] + size) / room[each])
            found[name] = member
            taken[member] += size
    return found
