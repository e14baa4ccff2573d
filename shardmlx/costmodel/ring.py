"""The sums of ranks that compute layers together, around MLX's ring. No MLX, no MPI."""

from __future__ import annotations

from typing import NamedTuple

SUM_SECONDS = 450e-6
"""Seconds of a sum beside its messages: a layer waits for it, and it for the layer. Fitted to
measurements between two Linux hosts of one core each."""


class Ring(NamedTuple):
    """The slowest link from one of the ``members`` to the next."""

    members: int
    latency: float
    byte_seconds: float

    def sum_seconds(self, nbytes: float) -> float:
        """Return the seconds of a sum: each part goes around twice."""
        if self.members == 1:
            return 0.0
        message = self.latency + nbytes / self.members * self.byte_seconds
        return 2 * (self.members - 1) * message + SUM_SECONDS
