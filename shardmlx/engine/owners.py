"""Divide weights among replicas: each has one owner. No MLX, no MPI."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass


def owners(sizes: Mapping[str, int], members: int) -> dict[str, int]:
    """Divide weights of so many elements, or bytes, among ``members``, in nearly equal parts.

    Neighbouring weights go to all in the same proportion, so that all links are busy while a few
    layers are summed or gathered. Only a few large weights are assigned first.
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


@dataclass(frozen=True, slots=True)
class Gathered:
    """A weight that replicas gather when they need it.

    Replicas that do not own it receive it into its ``place`` in a ``room``, which other weights use
    before and after. Weights of one ``kind`` have one owner, and are all in one room.
    """

    nbytes: int
    room: Hashable
    place: Hashable
    kind: Hashable
    is_trained: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a replica holds: its own weights, and places for others' weights."""

    frozen: int
    trained: int
    room: int

    @property
    def weights(self) -> int:
        return self.frozen + self.trained + self.room

    @property
    def with_update(self) -> int:
        """Bytes with a gradient, and Adam's moments, as large as the weights that are trained."""
        return self.weights + 3 * self.trained


def owners_of_gathered(weights: Mapping[str, Gathered], members: int) -> dict[str, int]:
    """Divide weights among ``members`` so that each sends as much of a layer as the others.

    All weights of a kind have one owner, which needs no places for them. Trained weights are
    divided apart: a large frozen matrix does not make up for gradients and optimizer state.
    """
    found: dict[str, int] = {}
    for is_trained in (False, True):
        some = {name: each for name, each in weights.items() if each.is_trained is is_trained}
        found |= _by_kind(some, members)
    return found


def held_by(weights: Mapping[str, Gathered], owned: Mapping[str, int], members: int) -> list[Held]:
    """Return the bytes that each of ``members`` holds, given the owner of each weight."""
    found = []
    for member in range(members):
        own = {False: 0, True: 0}
        places: dict[Hashable, int] = {}
        for name, each in weights.items():
            if owned[name] == member:
                own[each.is_trained] += each.nbytes
            else:
                places[each.place] = max(each.nbytes, places.get(each.place, 0))
        found.append(Held(own[False], own[True], sum(places.values())))
    return found


def _by_kind(weights: Mapping[str, Gathered], members: int) -> dict[str, int]:
    """Give the largest remaining kind to the member with the least in its room, and then in all."""
    sizes: Counter[Hashable] = Counter()
    room: dict[Hashable, Hashable] = {}
    for _, each in sorted(weights.items()):  # kinds of one size by name
        sizes[each.kind] += each.nbytes
        room[each.kind] = each.room
    taken = [0] * members
    in_room: defaultdict[Hashable, list[int]] = defaultdict(lambda: [0] * members)
    owner: dict[Hashable, int] = {}
    for kind, size in sizes.most_common():
        of_room = in_room[room[kind]]
        had = list(zip(of_room, taken, strict=True))
        owner[kind] = had.index(min(had))
        of_room[owner[kind]] += size
        taken[owner[kind]] += size
    return {name: owner[each.kind] for name, each in weights.items()}
