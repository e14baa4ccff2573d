"""What the service needs of a sampler, with which training takes turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardmlx.api.requests import SamplePrompt, SampleResult
from shardmlx.errors import UserError


class Sampler(Protocol):
    """A sampler on rank 0, which has the other ranks follow it between ``step`` and ``pause``. All
    of its methods are called on one thread. It finds snapshots in ``LoopWorker.snapshots``."""

    @property
    def is_idle(self) -> bool:
        """True while no sample is under way."""

    def begin(self, number: int, request: SamplePrompt) -> None:
        """Begin a sample, by which ``step`` names it. Raises ``UserError``."""

    def step(self) -> Sequence[tuple[int, SampleResult | UserError]]:
        """Compute a decode step, or a chunk of a prompt; return what has come to its end."""

    def cancel(self, number: int) -> None:
        """Give up a sample that has not ended."""

    def pause(self) -> None:
        """Let the other ranks take rank 0's commands again; samples go on with the next step. It
        may be called again, and while none is under way."""
