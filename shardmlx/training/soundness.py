"""Tell whether trained weights are worth keeping: they may replace better ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import mlx.core as mx

from shardmlx.distributed.transport import Transport
from shardmlx.engine.stage import Stage

WINDOW = 10
"""Updates among which skips are counted: a run that skips more than half learns nothing."""

TAMER = "lower --learning-rate, or give --dtype float32"

_IMPEL = "raise --learning-rate (look at lr_schedule), or give data in which tokens count"


class Fault(NamedTuple):
    """The reason why a run's weights should replace nothing, and the remedy."""

    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss so far, the step before whose update it was found, how many
    validations have come since, and the loss of the last."""

    loss: float | None = None
    step: int | None = None
    misses: int = 0
    last: float | None = None

    def after(self, step: int, loss: float | None) -> Best:
        """Return the best after one more validation; one without a number is none."""
        if loss is not None and loss < (math.inf if self.loss is None else self.loss):
            return Best(loss, step, last=loss)
        return replace(self, misses=self.misses + 1, last=loss)


@dataclass(frozen=True, slots=True)
class Soundness:
    """The updates of a run, made or skipped on all ranks together, and the weights that this rank
    ``holds``; ``has_moved`` says whether an update has changed one that it updates."""

    transport: Transport
    stages: Sequence[Stage]
    holds: Callable[[str], bool]
    has_moved: Callable[[], bool]
    _made: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def count(self, *, made: bool) -> None:
        self._made.append(made)

    @property
    def is_lost(self) -> bool:
        """True once more than half of ``WINDOW`` updates were skipped, whatever follows."""
        return self._made.count(False) > WINDOW // 2

    def fault(self) -> Fault | None:
        """Return why the weights should replace nothing, or None. All ranks must call it."""
        skipped, total = self._made.count(False), len(self._made)
        if 2 * skipped > total:
            return Fault(f"{skipped} of the last {total} updates were skipped", TAMER)
        weights = (
            (stage, name, stage.part[name])
            for stage in self.stages
            for name in filter(self.holds, stage.names)
        )
        mine = _first_nonfinite("weight", weights, self.transport)
        found = self.transport.all_gather(mine, "looking at the weights")
        weight = next(filter(None, found), None)
        return None if weight is None else Fault(weight, TAMER)

    def unmoved(self) -> Fault | None:
        """Return why there is nothing to save yet; None if there is. All ranks must call it."""
        if any(self.transport.all_gather(self.has_moved(), "looking for an update")):
            return None
        if True not in self._made:
            return Fault("no update was made yet", "train for more steps")
        return Fault("no update of this run has moved a weight", _IMPEL)


def nonfinite_loss(losses: Mapping[int, float], transport: Transport) -> str | None:
    """Name a micro-batch of this rank whose loss is not finite, if there is one."""
    for j, loss in losses.items():
        if not math.isfinite(loss):
            return f"the loss of micro-batch {j} is {loss} on {transport.name(transport.rank)}"
    return None


def nonfinite_gradient(stages: Sequence[Stage], transport: Transport) -> str | None:
    """Name a weight of this rank whose gradient is not finite, if there is one."""
    gradients = ((stage, *pair) for stage in stages for pair in stage.gradients.items())
    return _first_nonfinite("gradient of", gradients, transport)


def _first_nonfinite(
    what: str, arrays: Iterable[tuple[Stage, str, mx.array]], transport: Transport
) -> str | None:
    for stage, name, array in arrays:
        if not mx.isfinite(array).all().item():
            where = transport.name(transport.rank)
            return f"the {what} {name} is not finite on {where}, stage {stage.index}"
    return None
