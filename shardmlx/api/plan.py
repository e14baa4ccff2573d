"""The plan of ranks that carry out a training loop's requests: plain data. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.config.specs import Savings
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.memory.limits import MemoryLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """The plan of the ranks, made by rank 0 before weights are read.

    ``plan`` has the stages and the schedule, ``savings`` is what stages do to hold less. A
    micro-batch has at most ``tokens`` tokens, padding counted; with ``pack`` its rows are one row
    without padding. There are at most ``most_models`` models at a time, of ``most_rank``, and
    ``most_snapshots``; rows have at most ``most_length`` tokens. Samples are computed ``sequences``
    at a time, whose KV caches have ``cache_tokens`` together, prompts in chunks of ``chunk``
    tokens; ``random_state`` begins their random numbers.
    """

    plan: Plan
    shares: TensorShares
    savings: Savings
    dtype: str | None
    tokens: int
    pack: bool
    most_length: int
    most_models: int
    most_rank: int
    most_snapshots: int
    sequences: int
    cache_tokens: int
    chunk: int
    random_state: int
    limits: Sequence[MemoryLimits]

    @property
    def can_sample(self) -> bool:
        """True if rank i of a pipeline has stage i, and no other: samples take this order."""
        placement = self.plan.stage_map.placement
        return tuple(placement) == tuple(range(len(placement)))
