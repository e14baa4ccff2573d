"""Tags of messages, and how many runs can have their own. No MLX, no MPI."""

from __future__ import annotations

OBJECT_TAG = 0  # objects on the main thread
CHECKPOINT_TAG = 1  # all of the thread that writes checkpoints
COMMAND_TAG = 2  # rank 0's commands, and the answers to them
SCATTER_TAG = 3  # contributions to sums, on their way to the owners
GATHER_TAG = 4  # sums and updated weights, on their way to all that need them
LOSS_TAG = 5  # nothing: a rank that waits for it learns whether its peer is lost
TAGS_OF_A_RUN = 6

MOST_RUNS = 16
"""Limit of runs that train side by side: each has the tags above of its own."""

FIRST_ENGINE_TAG = TAGS_OF_A_RUN * MOST_RUNS  # the lowest of the engine


def tag_of_run(tag: int, run: int) -> int:
    """Return the tag that a run uses for ``tag``, by its number among those of the job."""
    return tag + TAGS_OF_A_RUN * run
