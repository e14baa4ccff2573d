"""Divide the optimizer among replicas: each updates the weights that it owns, and sends them.

ZeRO, stage 1 (Rajbhandari et al., arXiv:1910.02054), with whole weights: optimizers that need a
whole matrix, such as Muon and Adafactor, compute the same numbers. Gradients are summed to their
owners only; the updated weights go from these to all, layer by layer, while the next layer is
updated::

    replica 0   update q, up   of layer 5     send q, up     of layer 5, update those of layer 4
    replica 1   update k, down of layer 5     send k, down   of layer 5, update those of layer 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from shardmlx.distributed.exchanges import Exchange
from shardmlx.distributed.messages import in_a_row, new_buffer
from shardmlx.distributed.sums import Sums
from shardmlx.distributed.transport import Transport
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.owners import owners
from shardmlx.engine.stage import Stage


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

    def start_gather(self, names: Sequence[str]) -> None:
        """Start to send the weights ``names`` that are this replica's, and to receive the others.

        The weights are evaluated. Incoming ones have buffers at once, not to be read before
        ``finish_gather``. All replicas must call it, with the same names.
        """
        if self.weights is not None:
            self.weights.forget(names)
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
