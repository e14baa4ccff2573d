"""Scale the loss, so that gradients too small for float16 are not lost. No MLX, no MPI.

Factors are powers of two, which can be undone without rounding (Micikevicius et al.,
arXiv:1710.03740).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config.checks import NO_SCALE
from shardmlx.config.common_options import AUTO

FIRST = 2.0**16
"""Initial factor of a loss scale that adapts."""

LEAST, MOST = 1.0, 2.0**24
"""Limits of the factor: gradients that overflow without one overflow for another reason."""

UPDATES_TO_GROW = 2000
"""Updates without an overflow after which the factor is doubled."""


@dataclass(slots=True)
class LossScale:
    """The factor of the loss, the same on all ranks; if ``adapts``, it follows the gradients."""

    factor: float = 1.0
    adapts: bool = False
    good: int = 0
    """Updates since the factor last changed."""

    @classmethod
    def of(cls, option: float | str | None, dtype: str) -> LossScale:
        """Return the loss scale of ``--loss-scale``, for activations of a type."""
        if option is None:
            option = AUTO if dtype == "float16" else NO_SCALE
        if option == NO_SCALE:
            return cls()
        return cls(FIRST, adapts=True) if option == AUTO else cls(float(option))

    def updated(self) -> None:
        """Note that an update was made."""
        self.good += 1
        if self.adapts and self.good >= UPDATES_TO_GROW and self.factor < MOST:
            self.factor, self.good = 2 * self.factor, 0

    def overflowed(self) -> bool:
        """Halve the factor, if that may help; return whether it was halved."""
        if not self.adapts or self.factor <= LEAST:
            return False
        self.factor, self.good = self.factor / 2, 0
        return True

    def state(self) -> list[float]:
        """Return the state for a checkpoint."""
        return [self.factor, self.good]

    def restore(self, state: list[float]) -> None:
        """Restore ``state``; with another option the factor begins anew."""
        if self.adapts:
            self.factor, self.good = float(state[0]), int(state[1])
