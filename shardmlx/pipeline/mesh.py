"""Lay world ranks out as data parallel x pipeline parallel x tensor shares. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.errors import UserError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of data parallel x pipeline parallel: ``dp`` replicas of a pipeline of ``pp`` stages,
    each on ``tp`` ranks that share its tensors.

    World ranks run along the shares first, then along the pipeline, so that neighbours in the
    hostfile are neighbours there: without shares replica r has ``r * pp`` to ``r * pp + pp - 1``.
    """

    dp: int
    pp: int
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.pp, self.tp) < 1:
            raise ValueError(f"a mesh of {self.dp} x {self.pp} x {self.tp} ranks is empty")

    @classmethod
    def for_world(cls, size: int, pp: int) -> Mesh:
        """Return the mesh of ``size`` ranks with ``pp`` in each replica. Raises ``UserError``."""
        if pp < 1 or size % pp:
            raise UserError(
                f"{size} ranks cannot run pipelines of {pp} ranks each",
                f"start mpirun with -n {pp} or a multiple of it",
            )
        return cls(size // pp, pp)

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (replica, pipeline rank) of a world rank."""
        return divmod(rank // self.tp, self.pp)

    def rank(self, replica: int, pipeline_rank: int) -> int:
        """Return the world rank of (replica, pipeline rank), the first of those that share it."""
        return (replica * self.pp + pipeline_rank) * self.tp

    def sharing(self, rank: int) -> tuple[int, ...]:
        """Return the world ranks that share the tensors of a rank's stages, with itself."""
        first = self.rank(*self.coordinates(rank))
        return tuple(range(first, first + self.tp))

    def share(self, rank: int) -> int:
        """Return the place of a world rank among those that share its stages."""
        return rank % self.tp

    def replicas_of(self, pipeline_rank: int, share: int = 0) -> tuple[int, ...]:
        """Return the world ranks that hold the same share of the same stages, one a replica."""
        return tuple(self.rank(replica, pipeline_rank) + share for replica in range(self.dp))

    def pipeline_of(self, replica: int) -> tuple[int, ...]:
        """Return the world ranks of one replica, in pipeline order."""
        first = self.rank(replica, 0)
        return tuple(range(first, first + self.pp * self.tp))
