"""Sizes of the buffers that the engine holds, which the cost model counts. No MLX, no MPI."""

PREPOSTED = 2
"""Inputs that are received ahead of the micro-batch that is computed."""

COMPILED_POSITIONS = 32
"""Number of positions of which a compiled piece of the loss takes a multiple: each number is a
graph of its own."""

BUCKET_BYTES = 32 << 20
"""Gradients that replicas sum at a time."""

SUM_BUFFER_BYTES = 8 << 20
"""Contributions of others to sums, until they are added: of the chunks that are under way."""


def positions_of_piece(chunk: int, multiple_of: int = 1) -> int:
    """Return the positions whose loss is computed at a time: since all arrays of a piece exist
    together, its logits and several in float32, half as many as ``chunk`` allows."""
    return max(chunk // 2, multiple_of)
