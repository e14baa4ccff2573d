"""The sequences of a packed row as inputs of a compiled graph.

A graph is traced anew for each shape of its inputs, and packed rows are rarely equally long. So the
row is made longer, to one of a few lengths, and what the graph does may depend on these lengths,
but not on where in the row a sequence begins.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from shardmlx.models.runtime.packed_positions import PackedPositions, seen_by

NO_ROW = -1
"""Row of the positions at the end that belong to no sequence, and see only each other."""


class TracedPositions(NamedTuple):
    """The places of ``PackedPositions`` in a graph, (T,) int32; no sequence has more positions than
    ``longest``, a constant of the graph."""

    rows: mx.array
    positions: mx.array
    longest: int

    @classmethod
    def of(cls, places: PackedPositions, length: int, chunk: int | None) -> TracedPositions:
        """Return the places of a row that has grown to ``length``. The longest sequence makes a
        difference only where attention is computed in pieces of ``chunk`` queries."""
        more = length - len(places.rows)
        rows = np.append(places.rows, np.full(more, NO_ROW, np.int32))
        positions = np.append(places.positions, np.arange(more, dtype=np.int32))
        longest = length
        if chunk is not None and chunk < length:
            # A power of two, so that few graphs do.
            longest = 1 << (max(chunk, int(places.positions.max()) + 1) - 1).bit_length()
        return cls(mx.array(rows), mx.array(positions), longest)

    def mask(self, window: int | None = None) -> mx.array:
        """Return the mask (T, T) of ``PackedPositions.mask``."""
        return self.seen(slice(None), slice(None), window)

    def seen(self, queries: slice, keys: slice, window: int | None = None) -> mx.array:
        """Return the part of the mask for some queries and keys."""
        seen: mx.array = seen_by(self.rows, self.positions, window, queries, keys)
        return seen


Places = PackedPositions | TracedPositions
"""The places of a packed row, in a graph that is made once, or that is compiled."""
