"""Sizes of the buffers that the engine holds, which the cost model counts. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

PREPOSTED = 2
"""Inputs that are received ahead of the micro-batch that is computed."""

COMPILED_POSITIONS = 32
"""Number of positions in a compiled piece of the loss is a multiple of this: each number is a graph
of its own."""

LEAST_STEP = 32
"""Difference of the lengths to which a packed row grows for a compiled graph, at least."""

BUCKET_BYTES = 32 << 20
"""Gradients that replicas sum at a time."""

UPDATE_BYTES = 8 << 20
"""Weights in float32 that are updated at a time, if they are of several layers."""

TASKS_AHEAD = 10
"""Operations, on a GPU command buffers, that MLX allocates arrays for ahead of the running one."""

COMMAND_BUFFER = 50 * 2**20
"""Elements that the operations of one command buffer of Metal read, at most: as MLX's
``backend/metal/device.cpp`` has it for the largest chips."""

READ_PER_ALLOCATED = 4
"""Elements that a layer's operations read for each that they allocate: weights and operands."""

SUM_BUFFER_BYTES = 8 << 20
"""Bytes of others' contributions to sums in the chunks under way, until they are added."""


def ahead_of_gpu(itemsize: int) -> int:
    """Return the most bytes of arrays that wait for a GPU: MLX frees the arrays of a command buffer
    once the GPU is through with all of it."""
    return TASKS_AHEAD * COMMAND_BUFFER * itemsize // READ_PER_ALLOCATED


def positions_of_piece(chunk: int, multiple_of: int = 1) -> int:
    """Return how many positions a piece of the loss has: half as many as ``chunk`` allows, since
    its logits exist together with several float32 arrays."""
    return max(chunk // 2, multiple_of)


def compiled_length(length: int) -> int:
    """Return the positions of the compiled graph for a packed row of ``length``: one of 16 numbers
    between a power of two and the next, so that few graphs do, and at most a sixteenth more."""
    step = max(LEAST_STEP, 1 << max(0, (length - 1).bit_length() - 5))
    return -(-length // step) * step


def in_buckets(items: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Divide items of ``size`` float32 numbers into buckets of ``most`` bytes, in their order; a
    larger item has its own."""
    buckets: list[list[T]] = []
    room = 0
    for item in items:
        nbytes = 4 * size(item)
        if not buckets or nbytes > room:
            buckets.append([])
            room = most
        buckets[-1].append(item)
        room -= nbytes
    return buckets
