"""Facts behind the choice of a way to train, beside the options. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardmlx.config.specs import RunSpec
from shardmlx.models.sizes.shares import WHOLE, TensorShares
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.generation import GenerationSetup, beside_weights

CLOSE = 0.01
"""Share of a step, or of a row, below which a difference does not count."""


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Tokens of a run's sequences: ``longest`` of a step and forward-only, ``padded`` and ``exact``
    means of a row; ``counted`` is the share of ``exact`` that counts in the loss. ``widths`` are
    those of the plan."""

    longest: tuple[int, int]
    padded: int
    exact: int
    counted: float = 1.0
    widths: tuple[int, ...] = ()

    @classmethod
    def full(cls, length: int) -> SequenceLengths:
        """Return the lengths of rows that all have ``length`` tokens."""
        return cls((length, 0), length, length)

    @property
    def are_alike(self) -> bool:
        """True if rows are never padded, and packing has nothing to gain."""
        return self.exact >= (1 - CLOSE) * self.longest[0]

    def mean(self, pack: bool | None) -> int:
        """Return the mean length of a row as it is computed."""
        return self.exact if pack else self.padded

    def counted_share(self, pack: bool | None) -> float:
        """Return the share of the computed positions at which a token counts."""
        return self.counted if pack else self.counted * self.exact / self.padded


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts on which a choice depends beside the options; ``cluster`` has only usable memory."""

    workload: Workload
    cluster: Cluster
    lengths: SequenceLengths
    stage_map: StageMap | None = None
    shares: TensorShares = WHOLE
    """The parts of each layer that the ranks of a group have."""
    whole: PlanFacts | None = None
    """The facts of single ranks, where these are of groups with tensor shares."""
    ranks: tuple[int, ...] = ()
    """The rank that stands for each group, where these are of groups."""
    beside: GenerationSetup | None = None
    """The setup in which the stages, in order on the ranks, also generate, if they do."""

    @property
    def is_timed(self) -> bool:
        """True if the times of computing and of messages are known."""
        return self.cluster.unit == "seconds" and self.cluster.knows_messages

    def nbytes_beside(self, start: int, stop: int) -> int:
        """Return what a stage of these layers holds beside training."""
        return 0 if self.beside is None else beside_weights(self.beside, start, stop)

    def work(self, way: RunSpec) -> Workload:
        """Return the work of a way: its fine-tune, its batch, and its share of counted tokens."""
        share = self.lengths.counted_share(way.batch.pack)
        return replace(self.workload, batch=way.batch, fine_tune=way.fine_tune, counted=share)
