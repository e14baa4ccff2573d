"""Hidden states and their gradients, sent between stages in a shorter type than they compute in.

The sender rounds, and the receiver computes with what came: a gradient is that of the rounded
states, and goes back as if rounding had done nothing (a straight-through estimator). Stages on one
rank hand over what they have.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import Array, buffer_of, in_a_row
from shardmlx.distributed.wire_formats import Int8


class ShortMessages:
    """Messages of type ``dtype``, by MLX's name; None sends arrays as they are.

    In int8 blocks of 256 numbers share a scale. No error is kept for the next message: that has
    the states of other tokens.
    """

    def __init__(self, dtype: str | None) -> None:
        self._dtype: mx.Dtype | None = None if dtype is None else getattr(mx, dtype)
        self._blocks = Int8() if dtype == "int8" else None

    def outgoing(self, array: mx.array) -> Array:
        """Return what is sent of an evaluated array."""
        if self._blocks is not None:
            return self._blocks.encode(np.array(array.astype(mx.float32)).reshape(-1))
        if self._dtype is not None:
            array = array.astype(self._dtype)
            mx.eval(array)
        return in_a_row(array)

    def inbox(self, array: mx.array) -> Array:
        """Return where a message arrives that is to fill ``array``: at its beginning."""
        if self._dtype is None:
            return array
        nbytes = self._dtype.size * array.size
        if self._blocks is not None:
            nbytes = self._blocks.nbytes(array.size)
        return np.frombuffer(buffer_of(array), np.uint8)[:nbytes]

    def unpack(self, array: mx.array) -> None:
        """Widen what has arrived in ``inbox(array)``, in place."""
        if self._dtype is None:
            return
        data = np.array(self.inbox(array))
        if self._blocks is not None:
            short = mx.array(self._blocks.decode(data, array.size))
        else:
            short = mx.array(data).view(self._dtype)
        wide = short.astype(array.dtype)
        mx.eval(wide)
        buffer_of(array)[:] = buffer_of(wide)
