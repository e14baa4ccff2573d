"""Messages between ranks: arrays, their buffers, tags, and errors."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from shardmlx.compat import view_of

Array = mx.array | np.ndarray
"""Types of arrays that can be sent: only the buffer counts."""


class TransportError(RuntimeError):
    """A failure elsewhere that this rank has noticed."""


class TransportTimeout(TransportError):
    """A message that did not come in time."""


class PeerLost(TransportError):
    """The loss of a rank that has died, or gives no sign of life."""


class Handle:
    """A message under way. ``done`` becomes true once the array may be used again.

    ``error`` is set instead if the message failed, and raised by the wait.
    """

    __slots__ = ("array", "done", "error")

    def __init__(self, array: Array, done: bool = False) -> None:
        self.array = array  # keeps the buffer alive until the message is through
        self.done = done
        self.error: Exception | None = None


def buffer_of(array: Array) -> memoryview:
    """Return the bytes of an evaluated, row-contiguous array: no copy, writable.

    Raises ``ValueError`` for an array that is not contiguous.
    """
    view = view_of(array)
    if array.size == 0:
        return memoryview(bytearray())
    if not view.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous: it cannot be sent")
    return view.cast("B")


def parts_of(array: Array, nbytes: int) -> list[memoryview]:
    """Return the array's bytes, in parts of at most ``nbytes``; one part if the array is empty."""
    whole = buffer_of(array)
    return [whole[start : start + nbytes] for start in range(0, max(len(whole), 1), nbytes)]


def in_a_row(array: mx.array) -> mx.array:
    """Return an evaluated, contiguous array to send: itself, at no cost, if it is contiguous."""
    if not view_of(array).c_contiguous:
        array = mx.contiguous(array)
        mx.eval(array)
    return array


def copy_into(buffer: mx.array, array: mx.array) -> None:
    """Copy an evaluated array into a buffer of its shape and type, behind MLX's back."""
    buffer_of(buffer)[:] = buffer_of(in_a_row(array))


def new_buffer(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return a new evaluated array, to be filled by a message or from a file."""
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    return array
