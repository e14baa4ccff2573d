"""Sizes of the buffers that the engine holds, which the cost model counts. No MLX, no MPI."""

PREPOSTED = 2
"""Inputs that are received ahead of the micro-batch that is computed."""

COMPILED_POSITIONS = 32
"""Number of positions in a compiled piece of the loss is a multiple of this: each number is a graph
of its own."""

BUCKET_BYTES = 32 << 20
"""Gradients that replicas sum at a time."""

SUM_BUFFER_BYTES = 8 << 20
"""Bytes of others' contributions to sums in the chunks under way, until they are added."""


def positions_of_piece(chunk: int, multiple_of: int = 1) -> int:
    """Return how many positions a piece of the loss has: half as many as ``chunk`` allows, since
    its logits exist together with several float32 arrays."""
    return max(chunk // 2, multiple_of)
