"""Count the arrays of a layer that exist only while an action runs. No MLX, no MPI.

MLX allocates an array when it schedules it, and frees it once its last reader has run. On a CPU
the thread that schedules runs ahead of the one that computes by up to 10 tasks of 10 dispatches
(``MAX_ACTIVE_TASKS`` in mlx/transforms.cpp, ``DISPATCHES_PER_TASK`` in mlx/backend/cpu/encoder.h):
about a layer's forward, whose arrays then all exist, though few of them are in use.

The counts are therefore nearly whole, and hardly depend on the model. They come from traces of each
allocation and release in real stages (MLX 0.32, CPU; llama, lengths 128 to 1500, vocabularies of
3000 and 30000), and are maxima over many micro-batches: an upper bound, since a slower scheduling
thread holds less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Counts(NamedTuple):
    """Numbers of temporary arrays by kind, or bytes of one of each.

    Halves are arrays cut in two, as by rotary embedding. Arrays that the action has released count
    below zero.
    """

    hidden: float = 0.0
    """Residual stream, inside and around norms."""
    answers: float = 0.0
    """Outputs of all experts of a token, before they are summed."""
    mlp: float = 0.0
    """Gate, up, their intermediates and product, and the gradients of these."""
    products: float = 0.0
    """Products of an MLP that are recomputed with W."""
    queries: float = 0.0
    keys: float = 0.0
    """Keys and values."""
    scores: float = 0.0
    """Attention scores, one for each head and pair of positions."""
    mask: float = 0.0
    """The causal mask."""
    matrices: float = 0.0
    """Sums of a weight and its adapters, whose norm DoRA takes."""
    gradients: float = 0.0
    """Gradients of all trained weights of a layer."""
    logits: float = 0.0
    """Logits, one of which is held from F to I."""

    def nbytes(self, sizes: Counts) -> float:
        """Return the bytes of so many arrays of these sizes."""
        return sum(count * size for count, size in zip(self, sizes, strict=True))

    def plus(self, other: Counts) -> Counts:
        """Return the sums of both counts."""
        return Counts(*map(sum, zip(self, other, strict=True)))


class Moments(NamedTuple):
    """The peaks of an action of a stage.

    ``recomputed`` are those with gradient checkpointing: F keeps no arrays, and I adds the arrays
    of the recomputed layer.
    """

    held: Sequence[Counts]
    recomputed: Sequence[Counts]


FROZEN = (
    Counts(hidden=7, mlp=2, queries=7, keys=4, scores=1),
    Counts(hidden=3, mlp=2, logits=2),
)
"""Peaks of a forward without gradients: in a layer, and in the lm_head."""

FORWARD: Mapping[str, Moments] = {
    "adapters": Moments(
        held=(
            Counts(hidden=4, mlp=2, queries=2, matrices=3, logits=-1),
            Counts(hidden=3, mlp=2, matrices=1, logits=1),
        ),
        recomputed=(
            Counts(hidden=5, mlp=5, queries=4, keys=2, scores=1, mask=1, matrices=3, logits=-1),
            Counts(hidden=5, mlp=5, matrices=1, logits=1),
        ),
    ),
    "adapters with dropout": Moments(
        held=(
            Counts(hidden=3, mlp=4, matrices=3, logits=-1),
            Counts(hidden=4, mlp=4, matrices=1, logits=1),
        ),
        recomputed=(
            Counts(hidden=2, queries=8, keys=4, scores=1, mask=1, matrices=3, logits=-1),
            Counts(hidden=5, mlp=7, matrices=1, logits=1),
        ),
    ),
    "adapters of half precision": Moments(
        held=(
            Counts(hidden=15, mlp=7, queries=1, matrices=3, logits=-1),
            Counts(hidden=12, mlp=7, matrices=1, logits=1),
        ),
        recomputed=(
            Counts(hidden=18, mlp=11, mask=1, matrices=3, logits=-1),
            Counts(hidden=11, mlp=11, queries=5, keys=1, scores=1, mask=1, logits=-1),
            Counts(hidden=10, mlp=11, matrices=1, logits=1),
        ),
    ),
    "attention adapters": Moments(
        held=(
            Counts(hidden=4, mlp=1, queries=5, keys=1, logits=-1),
            Counts(hidden=4, mlp=1, queries=3, logits=1),
        ),
        recomputed=(
            Counts(hidden=5, mlp=3, queries=7, keys=4, scores=1, mask=1, logits=-1),
            Counts(hidden=5, mlp=3, queries=4, keys=2, scores=1, mask=1, logits=1),
        ),
    ),
    "weights": Moments(
        held=(
            Counts(hidden=2, queries=5, keys=1, logits=-1),
            Counts(hidden=3, queries=2, logits=1),
        ),
        recomputed=(
            Counts(hidden=4, mlp=3, queries=7, keys=4, scores=1, mask=1, logits=-1),
            Counts(hidden=5, mlp=3, queries=4, keys=2, scores=1, mask=1, logits=1),
        ),
    ),
}
"""Peaks of F by the trained weights: in the last layer, and in the loss."""

# Peaks in the MLP, in attention, and in the loss. A recomputed layer waits for no gradient: MLX
# computes the last one beside the loss, while its logits exist. Outputs of experts were counted in
# float32, the only type MLX gathers on a CPU: as many bytes as in half precision.
BACKWARD: Mapping[str, Moments] = {
    "adapters": Moments(
        # Quantised weights have one hidden array more, which is counted for both.
        held=(
            Counts(hidden=10, mlp=6.5, queries=4, scores=1, gradients=1, logits=-1),
            Counts(hidden=10, mlp=5.5, queries=4, scores=2, gradients=1, logits=-1),
            Counts(hidden=10, mlp=6.5, logits=1),
        ),
        recomputed=(
            Counts(hidden=8, mlp=10, queries=1, matrices=2, gradients=1, logits=-1),
            Counts(hidden=7, mlp=7, queries=4, scores=2, gradients=1, logits=-1),
            Counts(hidden=6, matrices=3, logits=1),
        ),
    ),
    "adapters with dropout": Moments(
        held=(
            Counts(hidden=9, mlp=6, gradients=1, logits=-1),
            Counts(answers=6, mlp=6, gradients=1, logits=-1),
            Counts(hidden=9, mlp=3, queries=4, scores=1, gradients=1, logits=-1),
            Counts(hidden=9, mlp=-1, queries=6, keys=1.5, scores=2, gradients=1, logits=-1),
            Counts(hidden=9, mlp=6, logits=1),
        ),
        recomputed=(
            Counts(hidden=8, mlp=10, matrices=2, gradients=1, logits=-1),
            Counts(answers=5, mlp=10, gradients=1, logits=-1),
            Counts(hidden=8, mlp=1, queries=6, keys=1, scores=2, gradients=1, logits=-1),
            Counts(hidden=-1, mlp=-6, queries=4, matrices=3, logits=1),
        ),
    ),
    "adapters of half precision": Moments(
        held=(
            Counts(hidden=26, mlp=10, queries=2, keys=3, scores=-1, gradients=1, logits=-1),
            Counts(hidden=21, mlp=2, queries=8, keys=1, scores=2, mask=2, gradients=1, logits=-1),
            Counts(hidden=12, mlp=10, logits=1),
            Counts(answers=12, mlp=10, gradients=1, logits=-1),
        ),
        recomputed=(
            Counts(hidden=18, mlp=17, matrices=2, gradients=1, logits=-1),
            Counts(hidden=19, mlp=2, queries=8, keys=1, scores=2, mask=2, gradients=1, logits=-1),
            Counts(hidden=20, queries=1, matrices=3, logits=1),
            Counts(answers=10, mlp=17, gradients=1, logits=-1),
        ),
    ),
    "attention adapters": Moments(
        held=(
            Counts(hidden=5, mlp=3, queries=10, keys=2, scores=2, gradients=1, logits=-1),
            Counts(hidden=9, mlp=3, queries=3, scores=2),
            Counts(hidden=9, mlp=3, queries=3, scores=1, logits=1),
            Counts(answers=5, mlp=3.2, logits=-1),
        ),
        recomputed=(
            Counts(hidden=4, mlp=4, queries=10, keys=1, scores=2, gradients=1, logits=-1),
            Counts(hidden=8, mlp=4, queries=2, logits=1),
        ),
    ),
    "weights": Moments(
        held=(
            Counts(hidden=6, mlp=3, queries=6.5, keys=3, scores=2, logits=-1),
            Counts(hidden=4, mlp=-2, queries=8, keys=6, gradients=1, logits=-1),
            Counts(hidden=10, mlp=3, queries=3, scores=2),
            Counts(hidden=10, mlp=3, queries=3, scores=1, logits=1),
            Counts(answers=5, mlp=3.2, logits=-1),
        ),
        recomputed=(
            Counts(hidden=5, mlp=5, queries=6.5, keys=3, scores=2, logits=-1),
            Counts(hidden=2, mlp=-1, queries=8, keys=6, gradients=1, logits=-1),
            Counts(hidden=6, mlp=5, queries=1, logits=1),
        ),
    ),
}
"""Peaks of I, and of W if there is no I, by the trained weights."""


_OF_LAYER = Counts(gradients=1, logits=-1)

UNLIKE: Mapping[str, Moments] = {
    "experts": Moments(
        held=(
            _OF_LAYER._replace(hidden=13, mlp=6),
            _OF_LAYER._replace(answers=6, mlp=6),
            _OF_LAYER._replace(hidden=20, mlp=4),
            _OF_LAYER._replace(hidden=10, mlp=2.3, queries=4, keys=4, scores=2),
            Counts(answers=6, mlp=6, logits=1),
        ),
        recomputed=(
            *BACKWARD["adapters"].recomputed,
            _OF_LAYER._replace(answers=5, mlp=10),
        ),
    ),
    "GELU": Moments(
        held=(
            _OF_LAYER._replace(hidden=12, mlp=4.8),
            _OF_LAYER._replace(hidden=10, mlp=2, queries=4, scores=2),
            Counts(hidden=10, mlp=4.8, logits=1),
        ),
        recomputed=BACKWARD["adapters"].recomputed,
    ),
    "GELU between norms": Moments(
        held=(
            _OF_LAYER._replace(hidden=12, mlp=4.8),
            _OF_LAYER._replace(hidden=7, queries=5, scores=2),
            Counts(hidden=10, mlp=4.8, logits=1),
        ),
        recomputed=BACKWARD["adapters"].recomputed,
    ),
    "MLP beside normed heads": Moments(
        held=(
            _OF_LAYER._replace(hidden=16, mlp=6),
            _OF_LAYER._replace(hidden=10, mlp=0.5, queries=4, scores=2),
            Counts(hidden=10, mlp=6, logits=1),
        ),
        recomputed=BACKWARD["adapters"].recomputed,
    ),
}
"""Peaks of I for adapters in layers with more operations than Llama's.

The scheduling thread, no more operations ahead than elsewhere, then has not reached attention while
arrays of the MLP exist. Counted on layers of sixteen families, in five sizes each, and on mixtures
of up to 8 experts a token.
"""


LATENT = Counts(mlp=-1.5)
"""Difference of I for weights of a layer with latent attention, which has more operations too."""


class Difference(NamedTuple):
    """Differences from the tables above in the backward, as in ``Moments``."""

    held: Counts
    recomputed: Counts
    selective: Counts = Counts()
    """Differences from ``held`` if norms and activations are recomputed."""


# A piece has more operations than a layer, so that the scheduling thread gets less far ahead.
IN_PIECES: Mapping[str, Difference] = {
    "adapters": Difference(held=Counts(hidden=-1.2, scores=-1), recomputed=Counts(mlp=-0.9)),
    "DoRA": Difference(held=Counts(hidden=1), recomputed=Counts(), selective=Counts(mlp=-2)),
    "adapters with dropout": Difference(held=Counts(hidden=1.5), recomputed=Counts()),
    "adapters of half precision": Difference(
        held=Counts(hidden=-2, scores=1), recomputed=Counts(), selective=Counts(mlp=-1.5)
    ),
    "attention adapters": Difference(
        held=Counts(hidden=-8, scores=-2), recomputed=Counts(hidden=-1, scores=-2)
    ),
    "weights": Difference(
        held=Counts(mlp=-0.1, scores=-2),
        recomputed=Counts(hidden=-2.8, scores=-2),
        selective=Counts(mlp=-1.2),
    ),
    "weights of half precision": Difference(
        held=Counts(mlp=-0.6, scores=-1.7), recomputed=Counts(hidden=-1.5)
    ),
}
"""Differences if attention is computed in pieces; ``scores`` then counts those of a piece."""

DORA_DROPS = Difference(held=Counts(hidden=7), recomputed=Counts(hidden=4))
"""Differences of DoRA's adapters with dropout from other adapters with dropout."""

SELECTIVE_MOMENT = Counts(hidden=-1, mlp=3)
"""Difference if norms and activations are recomputed."""
