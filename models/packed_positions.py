"""Tell where the positions of a row that holds several sequences come from. NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackedPositions(NamedTuple):
    """Positions of a row that holds several sequences, one after the other.

    For each of them, the row of the batch that the sequence was, and the position in it: both (T,),
    int32.
    """

    rows: np.ndarray
    positions: np.ndarray

    def mask(self, window: int | None = None) -> np.ndarray:
        """Return a mask (T, T) of what each position sees: itself and what precedes it in its own
        sequence, of which a ``window`` leaves the last so many."""
        # Nothing of (T, T) is larger than the mask itself.
        seen: np.ndarray = self.rows[:, None] == self.rows
        seen &= self.positions[:, None] >= self.positions
        if window is not None:
            seen &= self.positions[:, None] - window < self.positions
        return seen
