"""Lay world ranks out as data parallel x pipeline parallel. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.errors import UserError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of data parallel x pipeline parallel: ``dp`` replicas of a pipeline of ``pp`` ranks.

    World ranks run along the pipeline first: the ranks of replica r are ``r * pp`` to
    ``r * pp + pp - 1``, so that neighbours in the hostfile are neighbours in the pipeline.
    """

    dp: int
    pp: int

    def __post_init__(self) -> None:
        if self.dp < 1 or self.pp < 1:
            raise ValueError(f"a mesh of {self.dp} x {self.pp} ranks is empty")

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
        return self.dp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (replica, pipeline rank) of a world rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.dp} x {self.pp} ranks")
        return divmod(rank, self.pp)

    def rank(self, replica: int, pipeline_rank: int) -> int:
        """Return the world rank of (replica, pipeline rank)."""
        return replica * self.pp + pipeline_rank

    def replicas_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the world ranks that hold the same stages, one in each replica."""
        return tuple(self.rank(replica, pipeline_rank) for replica in range(self.dp))

    def pipeline_of(self, replica: int) -> tuple[int, ...]:
        """Return the world ranks of one replica, in pipeline order."""
        return tuple(self.rank(replica, stage_rank) for stage_rank in range(self.pp))
