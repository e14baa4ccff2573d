"""Tell the origin of the positions in a row with several sequences. NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackedPositions(NamedTuple):
    """Positions of a row with several sequences, one after the other.

    Each has the sequence's row in the batch, and the position in it: both (T,), int32.
    """

    rows: np.ndarray
    positions: np.ndarray

    def mask(self, window: int | None = None) -> np.ndarray:
        """Return a mask (T, T) of the positions that each position sees: itself and those before it
        in its own sequence, or only the last ``window`` of these."""
        # No (T, T) array is larger than the mask itself.
        seen: np.ndarray = self.rows[:, None] == self.rows
        seen &= self.positions[:, None] >= self.positions
        if window is not None:
            seen &= self.positions[:, None] - window < self.positions
        return seen
