"""Divide the optimizer, or all weights, of a rank's stages among replicas.

ZeRO (Rajbhandari et al., arXiv:1910.02054) with whole weights: optimizers that need a whole matrix,
such as Muon and Adafactor, compute the same numbers. In stage 1 each replica updates the weights
that it owns. Gradients are summed to their owners only; the updated weights go from these to all,
layer by layer, while the next layer is updated::

    replica 0   update q, up   of layer 5     send q, up     of layer 5, update those of layer 4
    replica 1   update k, down of layer 5     send k, down   of layer 5, update those of layer 4

In stage 3 each replica gathers a layer when it needs it. A replica keeps the weights that it owns.
The others' weights are received, layer after layer, into buffers for two layers, the rooms::

    layer           0              1              2              3
    computes        with room 0    with room 1    with room 0    with room 1
    is received     1 to room 1    2 to room 0    3 to room 1    ...

The graphs of layers 0 and 2 refer to the same arrays, so a layer must be gathered again before its
graph is evaluated: ``use`` does that, in forward and backward. Embedding and lm_head share a third
room, as far as they are alike. A matrix that a replica owns in each of layers 0, 2, 4, ... needs no
room there: owners are chosen so, each with about an equal part of a layer.

All replicas use the same layers in the same order, and so start the same exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import mlx.core as mx

from shardmlx.distributed.exchanges import Exchange
from shardmlx.distributed.messages import in_a_row, new_buffer
from shardmlx.distributed.sums import Sums
from shardmlx.distributed.transport import Transport
from shardmlx.engine.owners import Gathered, owners, owners_of_gathered
from shardmlx.engine.stage import Stage
from shardmlx.engine.trace import Recorder, Span
from shardmlx.models.runtime.slice import Slice

ENDS = 2
"""Number of the room of embedding and lm_head; layers have rooms 0 and 1."""

Place = tuple[int, tuple[int, ...], mx.Dtype, int]
"""The room of a weight, its shape and type, and its number among those that are alike there."""


class DividedWeights:
    """The weights of one rank's stages, of which it holds its own and two layers of the others.

    ``parts`` are the stages' slices, still unread: arrays of a room replace weights that other
    replicas own. ``replicas`` are the world ranks that hold the same stages, and ``rank`` is one of
    them.
    """

    def __init__(self, rank: int, replicas: Sequence[int], parts: Sequence[Slice]) -> None:
        self._replicas = tuple(replicas)
        self._member = self._replicas.index(rank)
        self._places = _places(parts)
        self.owners = _divide(parts, self._places, len(self._replicas))
        self._room: dict[Place, mx.array] = {}
        for part in parts:
            for name in part.parameters():
                if not self.is_mine(name):
                    _, shape, dtype, _ = place = self._places[name]
                    if place not in self._room:
                        # Its own buffer, since messages write into it behind MLX's back.
                        self._room[place] = new_buffer(shape, dtype)
                    part[name] = self._room[place]
        self._present: dict[Place, str] = {}
        self._under_way: tuple[str, Exchange] | None = None
        self._count = 0

    def is_mine(self, name: str) -> bool:
        """Tell whether this replica keeps a weight, and updates it if it is trained."""
        return self.owners[name] == self._member

    def nbytes(self, parts: Sequence[Slice]) -> int:
        """Return the bytes of this replica's weights, and of the rooms for others'."""
        own = {
            name: array.nbytes
            for part in parts
            for name, array in part.parameters().items()
            if self.is_mine(name)
        }
        return sum(own.values()) + sum(array.nbytes for array in self._room.values())

    def connect(self, sums: Sums, recorder: Recorder, who: str) -> None:
        """Set how to reach the other replicas, before the first ``use``."""
        self._sums, self._recorder, self._who = sums, recorder, who

    def use(self, part: Slice, group: int, following: int | None = None) -> None:
        """Wait until all weights of a ``group`` of ``part`` (``Slice.groups``) are there.

        The ``following`` group is then under way, received while this one computes. Earlier groups
        are overwritten. All replicas must call it.
        """
        self._start(part, group)
        self._finish()
        if following is not None:
            self._start(part, following)

    def forget(self, names: Iterable[str]) -> None:
        """Gather these weights again before their next use: they have changed."""
        for name in names:
            if self._present.get(self._places[name]) == name:
                del self._present[self._places[name]]

    def _start(self, part: Slice, group: int) -> None:
        """Start to receive the missing weights of a group, and to send this replica's own."""
        lacking = [
            name for name in part.groups[group] if self._present.get(self._places[name]) != name
        ]
        if not lacking:
            return
        # One exchange at a time: two might be for the same room.
        self._finish()
        owned: list[list[mx.array]] = [[] for _ in self._replicas]
        for name in lacking:
            self._present[self._places[name]] = name
            owned[self.owners[name]].append(in_a_row(part[name]))
        what = part.name_of(group)
        self._under_way = what, self._sums.all_gather(owned, self._replicas)

    def _finish(self) -> None:
        if self._under_way is None:
            return
        what, exchange = self._under_way
        self._under_way = None
        self._count += 1
        key = (self._count, -3, self._replicas[0])
        with self._recorder.span(Span.GATHER, f"weights of {what}", key):
            self._sums.wait(exchange, lambda: f"{self._who}, gathering the weights of {what}")


def _divide(parts: Sequence[Slice], places: Mapping[str, Place], members: int) -> dict[str, int]:
    """Return the owner of each weight. Embedding and lm_head share a room, but not an owner."""
    trained = {name for part in parts for name in part.trainable}
    weights = {}
    for part in parts:
        for name, array in part.parameters().items():
            place = places[name]
            kind = name if place[0] == ENDS else place
            weights[name] = Gathered(array.nbytes, place[0], place, kind, name in trained)
    return owners_of_gathered(weights, members)


def _places(parts: Sequence[Slice]) -> dict[str, Place]:
    """Return the place of each weight in the rooms."""
    places: dict[str, Place] = {}
    for part in parts:
        last = len(part.groups) - 1
        for group, names in enumerate(part.groups):
            room = ENDS if group in (0, last) else group % 2
            taken = {places[name] for name in names if name in places}  # a tied matrix
            for name in names:
                if name not in places:
                    kind = room, tuple(part[name].shape), part[name].dtype
                    places[name] = next(
                        place for number in count() if (place := (*kind, number)) not in taken
                    )
                    taken.add(places[name])
    return places


class Shards:
    """The weights of one rank's stages, and which of its ``replicas`` owns each.

    If ``divides`` is False, each replica owns all. If the ``weights`` themselves are divided, a
    weight's owner updates it, and replicas gather it when they use it.
    """

    def __init__(
        self,
        transport: Transport,
        replicas: Sequence[int],
        stages: Sequence[Stage],
        sums: Sums,
        *,
        divides: bool,
        weights: DividedWeights | None = None,
    ) -> None:
        self.divides = (divides or weights is not None) and len(replicas) > 1
        self.weights = weights
        self.replicas = tuple(replicas)
        self._who = transport.name(transport.rank)
        self._replica = self.replicas.index(transport.rank)
        self._stages = stages
        self._sums = sums
        self._started: list[Exchange] = []
        sizes = {name: stage.part[name].size for stage in stages for name in stage.names}
        self._owners: Mapping[str, int] = {}
        if weights is not None:
            self._owners = weights.owners
        elif self.divides:
            self._owners = owners(sizes, len(self.replicas))

    def owner(self, name: str) -> int:
        """Return the replica that owns a weight: this one if each owns all."""
        return self._owners.get(name, self._replica)

    def is_mine(self, name: str) -> bool:
        """Tell whether this replica updates a weight."""
        return self.owner(name) == self._replica

    def holds(self, name: str) -> bool:
        """Tell whether this replica keeps a weight between uses."""
        return self.weights is None or self.is_mine(name)

    def forget(self, names: Iterable[str]) -> None:
        """Let weights that replicas divide be gathered again before their next use: their owners
        have set them anew. All replicas must call it, with the same names."""
        if self.weights is not None:
            self.weights.forget(names)

    def start_gather(self, names: Sequence[str]) -> None:
        """Start to send the weights ``names`` that are this replica's, and to receive the others.

        The weights are evaluated. Incoming ones have buffers at once, not to be read before
        ``finish_gather``. All replicas must call it, with the same names.
        """
        self.forget(names)
        if not self.divides or self.weights is not None:
            return
        owned: list[list[mx.array]] = [[] for _ in self.replicas]
        for name in names:
            holders = [stage.part for stage in self._stages if name in stage.names]
            old = holders[0][name]
            # A new buffer, since a checkpoint may still refer to the old one.
            mine = self.is_mine(name)
            new = in_a_row(old) if mine else new_buffer(old.shape, old.dtype)
            for part in holders:
                part[name] = new
            owned[self.owner(name)].append(new)
        self._started.append(self._sums.all_gather(owned, self.replicas))

    def finish_gather(self) -> None:
        """Wait until all weights are there. All replicas must call it."""
        for exchange in self._started:
            self._sums.wait(exchange, lambda: f"{self._who}, gathering updated weights")
        self._started.clear()
