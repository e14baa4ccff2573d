"""Tell the origin of the positions in a row with several sequences. NumPy only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class PackedPositions(NamedTuple):
    """Positions of a row with several sequences, one after the other.

    Each has the sequence's row in the batch, and the position in it: both (T,), int32. A sequence
    that does not begin at position 0 shares the positions before with the one that lies before it.
    """

    rows: np.ndarray
    positions: np.ndarray

    @property
    def shares_prefixes(self) -> bool:
        """True if a sequence has its beginning in another."""
        return bool(self.positions[self._starts].any())

    @property
    def _starts(self) -> np.ndarray:
        return np.flatnonzero(np.diff(self.rows, prepend=-1))

    def whole(self) -> tuple[PackedPositions, np.ndarray, np.ndarray]:
        """Return the places of sequences that all begin at 0, the index here of each of these, and
        the index among these of each of those here."""
        starts = self._starts
        befores = np.append(0, starts[:-1])
        stops = np.append(starts[1:], len(self.rows))
        shared = self.positions[starts]
        lengths = stops - starts
        parts = zip(befores, befores + shared, starts, stops, strict=True)
        sources = np.concatenate([np.r_[a:b, start:stop] for a, b, start, stop in parts])
        own = np.arange(len(self.rows)) + np.repeat(np.cumsum(shared), lengths)
        return (
            PackedPositions(
                np.repeat(self.rows[starts], lengths + shared), self.positions[sources]
            ),
            sources,
            own,
        )

    def mask(self, window: int | None = None) -> np.ndarray:
        """Return a mask (T, T) of the positions that each position sees: itself and those before it
        in its own sequence, or only the last ``window`` of these."""
        seen: np.ndarray = seen_by(self.rows, self.positions, window)
        return seen


def seen_by(
    rows: Any,
    positions: Any,
    window: int | None,
    queries: slice = slice(None),
    keys: slice = slice(None),
) -> Any:
    """Return which ``keys`` each of the ``queries`` sees, (queries, keys), as ``mask`` does, of
    arrays of NumPy or of MLX."""
    # No array is larger than the mask itself.
    seen = rows[queries, None] == rows[keys]
    seen &= positions[queries, None] >= positions[keys]
    if window is not None:
        seen &= positions[queries, None] - window < positions[keys]
    return seen
