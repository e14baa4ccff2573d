"""Define the actions that schedules are made of. No MLX, no MPI.

An action prints as stage, kind, micro-batch: ``0F3``, ``1I3``, ``0SEND_F3``; the notation of
torch.distributed.pipelining.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an action: its effect on a micro-batch at a stage."""

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # gradient for the stage's input only
    W = "W"  # gradient for the stage's weights only
    SEND_F = "SEND_F"  # the stage's output, to the stage after it
    RECV_F = "RECV_F"  # the stage's input, from the stage before it
    SEND_B = "SEND_B"  # the gradient of the stage's input, to the stage before it
    RECV_B = "RECV_B"  # the gradient of the stage's output, from the stage after it


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
"""The kinds that compute; others send and receive."""

FORWARD = (Kind.RECV_F, Kind.F, Kind.SEND_F)


_WORDS = {
    Kind.F: "forward of",
    Kind.B: "backward of",
    Kind.I: "input gradient of",
    Kind.W: "weight gradients of",
    Kind.SEND_F: "the hidden states of",
    Kind.RECV_F: "the hidden states of",
    Kind.SEND_B: "the gradient of",
    Kind.RECV_B: "the gradient of",
}
"""The work of an action on a micro-batch, or the content of its message."""


class Action(NamedTuple):
    """The cell of a schedule: one micro-batch at one stage.

    ``stage`` counts from 0 at the embedding; ``microbatch`` counts within the replica's step.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def words(self) -> str:
        """The action in plain words, without its stage: ``the gradient of micro-batch 3``."""
        return f"{_WORDS[self.kind]} micro-batch {self.microbatch}"

    @property
    def neighbour(self) -> int:
        """The stage that a message goes to or comes from."""
        return self.stage + (1 if self.kind in (Kind.SEND_F, Kind.RECV_B) else -1)


Grid = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank, in order: ``grid[rank][i]``."""
