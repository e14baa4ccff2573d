"""A training run as it is planned: on rank 0, for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardmlx.config.specs import RunSpec
from shardmlx.config.train import TrainConfig
from shardmlx.engine.objectives import Objective
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.limits import MemoryLimits, PlannedMemory
from shardmlx.planning.time.predict import Prediction, planned_memory, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run with a plan that fits, before any weight is read.

    ``config`` is the run as the user wants it, ``way`` the same with nothing left open. The plan is
    for the ``workload`` of one rank of each group, ``parts`` are those of all its ranks. ``sizes``
    are those of the data's sets. Rank 0 makes it, and sends it to all ranks.
    """

    config: TrainConfig
    way: RunSpec
    objective: Objective | None
    workload: Workload
    parts: Sequence[Workload]
    cluster: Cluster
    plan: Plan
    shares: TensorShares
    sizes: Mapping[str, int]
    lengths: SequenceLengths
    limits: tuple[MemoryLimits, ...]

    @property
    def mean_length(self) -> int:
        """Mean length of the rows of a step as they are computed, in tokens."""
        return self.lengths.mean(self.plan.pack)

    def predict(self, length: int) -> Prediction:
        """Return the prediction of a step of sequences of ``length`` tokens."""
        return predict(self.plan, self.workload, self.cluster, length)

    def peaks(self, length: int) -> list[int]:
        """Return the peak bytes of each rank in a step of sequences of ``length`` tokens."""
        memory = memory_of_ranks(self.plan, self.parts, self.cluster, (length, 0))
        return [each.peak for each in memory]

    def seconds(self, length: int) -> float | None:
        """Return the predicted seconds of such a step; None where speeds are unknown."""
        return self.predict(length).step_seconds if self.cluster.unit == "seconds" else None


def memory_of_ranks(
    plan: Plan, parts: Sequence[Workload], cluster: Cluster, lengths: tuple[int, int]
) -> list[PlannedMemory]:
    """Return the memory that each rank takes for its part."""
    of_parts = [planned_memory(plan, part, cluster, lengths) for part in parts]
    return [of_parts[plan.mesh.share(rank)][rank] for rank in range(plan.mesh.size)]
