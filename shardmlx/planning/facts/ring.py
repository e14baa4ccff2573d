"""The sums of ranks that compute layers together, over MLX's ring or RDMA. No MLX, no MPI."""

from __future__ import annotations

from typing import NamedTuple

SUM_SECONDS = 450e-6
"""Seconds of a sum over TCP beside its messages: a layer waits for it, and it for the layer. Fitted
to decoding between two Linux hosts of one core each."""

RDMA_SUM_SECONDS = 30e-6
"""Seconds of a sum over RDMA: the middle of the 10 to 50 us that are reported of MLX's JACCL on
Thunderbolt 5 (Apple's technical note 3205). Ours is not measured: no Mac has run it yet."""


class Ring(NamedTuple):
    """The slowest link from one of the ``members`` to the next; ``rdma`` are the seconds of a sum
    beside its bytes, if RDMA links all."""

    members: int
    latency: float
    byte_seconds: float
    rdma: float | None = None

    def sum_seconds(self, nbytes: float) -> float:
        """Return the seconds of a sum: each part goes around twice."""
        if self.members == 1:
            return 0.0
        messages = 2 * (self.members - 1)
        once = messages * self.latency + SUM_SECONDS if self.rdma is None else self.rdma
        return once + messages * nbytes / self.members * self.byte_seconds
