"""The plan of ranks that carry out a training loop's requests: plain data. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmlx.config.specs import Savings
from shardmlx.inference.route import TokenRoute
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.memory.limits import MemoryLimits

WAITING = "waiting for requests"
"""The activity of ranks that neither train nor sample, as others tell of a lost one."""


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
    def route(self) -> TokenRoute | None:
        """The way of samples, through the ranks of the first replica; None if the stage map has the
        first stage elsewhere than on rank 0, where prompts come in."""
        placement = self.plan.stage_map.placement
        if placement[0] != 0:
            return None
        return TokenRoute.of(replace(self.plan.mesh, dp=1), placement)

    @property
    def layers_of_hops(self) -> list[tuple[int, int]]:
        """The layers of each hop of the route, half-open."""
        ranges = self.plan.stage_map.partition.ranges
        hops = self.route.hops if self.route is not None else ()
        return [(ranges[hop.first][0], ranges[hop.last][1]) for hop in hops]
