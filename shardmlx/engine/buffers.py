"""Sizes of the buffers that the engine holds, which the cost model counts. No MLX, no MPI."""

PREPOSTED = 2
"""Inputs that are received ahead of the micro-batch that is computed."""

BUCKET_BYTES = 32 << 20
"""Gradients that replicas sum in one message."""
