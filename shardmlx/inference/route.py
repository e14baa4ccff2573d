"""The way of a token through the ranks of a pipeline. No MLX, no MPI.

Where a rank has one stage, each rank comes once. Where it has several, the way comes back to it::

    1f1b, 3 ranks    zb-v, 3 ranks          interleaved-1f1b, 2 ranks
    0 -> 1 -> 2      0 -> 1 -> 2            0 -> 1
                                |             /
                     0 <- 1 <- -            0 -> 1

Stages that follow each other on one rank, as in the turn of a V, are computed as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from shardmlx.pipeline.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Hop:
    """Stages ``first`` to ``last``, which follow each other on a pipeline ``rank``."""

    rank: int
    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"stage {self.first}"
        return f"stages {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class TokenRoute:
    """The ``hops`` of a token on the ranks of a ``mesh`` with one pipeline, in order. It begins on
    rank 0."""

    mesh: Mesh
    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        if self.hops[0].rank != 0:
            raise ValueError(f"a route that begins on rank {self.hops[0].rank}")

    @classmethod
    def of(cls, mesh: Mesh, placement: Sequence[int] | None = None) -> TokenRoute:
        """Return the route through stages of this ``placement`` on pipeline ranks: by default one
        stage on each, in order."""
        stages = enumerate(range(mesh.pp) if placement is None else placement)
        hops = []
        for rank, group in groupby(stages, key=lambda each: each[1]):
            numbers = [stage for stage, _ in group]
            hops.append(Hop(rank, numbers[0], numbers[-1]))
        return cls(mesh, tuple(hops))

    @property
    def comes_back(self) -> bool:
        """True if a rank has several hops."""
        return len(self.hops) > self.mesh.pp

    @property
    def end(self) -> int:
        """The world rank on which tokens are sampled: the first of those that share the last
        hop."""
        return self.mesh.rank(0, self.hops[-1].rank)

    def numbers(self, rank: int) -> list[int]:
        """Return the numbers of the hops that a world rank has, or has a share of."""
        _, mine = self.mesh.coordinates(rank)
        return [number for number, hop in enumerate(self.hops) if hop.rank == mine]

    def giver(self, number: int, rank: int) -> int:
        """Return the world rank that gives a ``rank`` what enters its hop of this number: tokens
        come from rank 0, hidden states from the hop before."""
        return self._of_hop(number - 1, number, rank) if number else 0

    def taker(self, number: int, rank: int) -> int:
        """Return the world rank to which a ``rank`` gives what its hop of this number computes, if
        another hop follows."""
        return self._of_hop(number + 1, number, rank)

    def _of_hop(self, other: int, number: int, rank: int) -> int:
        """Return the world rank with the same share of another hop."""
        return rank + (self.hops[other].rank - self.hops[number].rank) * self.mesh.tp
