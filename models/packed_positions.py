"""Where the positions of a row come from that holds several texts. Pure: NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackedPositions(NamedTuple):
    """Of each position of a row that holds several texts, one after the other: the row of the
    batch that the text was, and the position in it. Both (T,), int32."""

    rows: np.ndarray
    positions: np.ndarray

    def mask(self, window: int | None = None) -> np.ndarray:
        """(T, T): what each position sees, itself and what comes before it in its own text, of
        which a ``window`` leaves the last so many."""
        # Nothing of (T, T) is larger than the mask itself.
        seen: np.ndarray = self.rows[:, None] == self.rows
        seen &= self.positions[:, None] >= self.positions
        if window is not None:
            seen &= self.positions[:, None] - window < self.positions
        return seen
