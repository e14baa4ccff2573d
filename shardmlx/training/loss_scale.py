"""The factor of the loss of a run, so that gradients too small for float16 are not lost: rank 0
chooses it, and every rank divides it out again before its update.

A factor that is dynamic follows the gradients, with the numbers of torch's ``GradScaler`` and of
Apex (Micikevicius et al., arXiv:1710.03740). Its values are powers of two, which can be divided out
without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmlx.config.checks import DYNAMIC

LOSS_SCALE = "loss_scale"
"""The name in a checkpoint's state, and in the metrics."""

FIRST = 2.0**16
"""The factor with which a run begins."""

LEAST = 1.0
"""The least factor: gradients that overflow without one overflow for another reason."""

MOST = 2.0**24
"""The largest factor, as in Apex."""

UPDATES_TO_GROW = 2000
"""Updates in a row without an overflow, after which the factor is doubled."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A ``factor`` of the loss, and the updates that were made since it last changed. Without
    ``is_dynamic`` it stays."""

    factor: float = 1.0
    is_dynamic: bool = False
    updates: int = 0

    @classmethod
    def of(cls, option: float | str | None) -> LossScale:
        """Return the loss scale with which a run begins whose ``loss_scale`` is this."""
        if option is None:
            return cls()
        return cls(FIRST, is_dynamic=True) if option == DYNAMIC else cls(float(option))

    @property
    def can_fall(self) -> bool:
        """True if a lower factor may avoid an overflow."""
        return self.is_dynamic and self.factor > LEAST

    def after_update(self) -> LossScale:
        """Return the loss scale after an update that was made."""
        updates = self.updates + 1
        if self.is_dynamic and updates >= UPDATES_TO_GROW and self.factor < MOST:
            return replace(self, factor=2 * self.factor, updates=0)
        return replace(self, updates=updates)

    def after_overflow(self) -> LossScale:
        """Return the loss scale after an update that was skipped since a gradient overflowed."""
        return replace(self, factor=self.factor / 2, updates=0)

    def state(self) -> list[float]:
        """Return what a checkpoint keeps: the factor, and the updates since it changed."""
        return [self.factor, self.updates]

    def restored(self, state: Sequence[float] | None) -> LossScale:
        """Return the loss scale of a checkpoint; this one if it stays, or if there is none."""
        if state is None or not self.is_dynamic:
            return self
        factor, updates = state
        return replace(self, factor=float(factor), updates=int(updates))
