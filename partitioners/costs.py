"""Hold what each layer costs, or weighs: the numbers that a partitioner balances."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardmlx.errors import UserError


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Cost of each decoder layer, of the embedding (first stage), of norm and lm_head (last stage).

    Any one unit: seconds, FLOPs, bytes. ``ValueError`` for what is negative or not finite.
    """

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        for cost in (*self.layers, self.embedding, self.head):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"a cost of {cost}")

    def total(self, start: int, stop: int) -> float:
        """Return the cost of layers ``start`` to ``stop`` as a stage, with its ends."""
        ends = (self.embedding * (start == 0), self.head * (stop == len(self.layers)))
        return math.fsum((*self.layers[start:stop], *ends))

    def check_stages(self, num_stages: int) -> None:
        """Raise ``UserError`` unless the layers make that many stages, none of them empty."""
        if num_stages < 1:
            raise UserError(f"{num_stages} pipeline stages", "give 1 or more")
        if num_stages > len(self.layers):
            raise UserError(
                f"{num_stages} stages, but the model has {len(self.layers)} layers",
                f"use at most {len(self.layers)} stages",
            )
