"""Tell whether trained weights are worth keeping: they may replace better ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardmlx.distributed.crew import Crew
from shardmlx.training.run_worker import RunWorker

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


def skipped_most(made: Sequence[bool]) -> Fault | None:
    """Return the fault of updates of which more were skipped than ``made``, if they were."""
    skipped = made.count(False)
    if 2 * skipped > len(made):
        return Fault(f"{skipped} of the last {len(made)} updates were skipped", TAMER)
    return None


def not_finite(weights: Sequence[str | None]) -> Fault | None:
    """Return the fault of the first weight that a rank has named as not finite, if there is one."""
    weight = next(filter(None, weights), None)
    return None if weight is None else Fault(weight, TAMER)


def nothing_moved(made: Sequence[bool], moved: Sequence[bool]) -> Fault | None:
    """Return why there is nothing to save: ``moved`` says of each rank whether its weights have
    moved, ``made`` which updates were made. None if any rank's have."""
    if any(moved):
        return None
    if True not in made:
        return Fault("no update was made yet", "train for more steps")
    return Fault("no update of this run has moved a weight", _IMPEL)


@dataclass(frozen=True, slots=True)
class Soundness:
    """Tells, on rank 0, whether a run's weights may replace others: the updates that were made or
    skipped, and what each rank says of its weights."""

    crew: Crew[RunWorker]
    _made: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def count(self, *, made: bool) -> None:
        """Count an update, or one that was skipped."""
        self._made.append(made)

    @property
    def is_lost(self) -> bool:
        """True once more than half of ``WINDOW`` updates were skipped, whatever follows."""
        return self._made.count(False) > WINDOW // 2

    def fault(self) -> Fault | None:
        """Return why the weights should replace nothing, or None."""
        return skipped_most(self._made) or not_finite(self.crew.all(RunWorker.nonfinite_weight))

    def unmoved(self) -> Fault | None:
        """Return why there is nothing to save yet; None if there is."""
        return nothing_moved(self._made, self.crew.all(RunWorker.has_moved))
