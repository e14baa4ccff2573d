"""Sizes of one decoder layer. No MLX, no MPI.

A matrix product of m x k by k x n counts 2 m k n FLOPs; norms, activations and rotary embedding are
left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Activation(NamedTuple):
    """The function between an MLP's products, in arrays of the MLP's width.

    ``kept`` are those that mlx-lm keeps for the gradient beside gate and up, ``passing`` temporary
    ones of the backward beyond those of SwiGLU, and ``weights`` those for gradients of its own
    weights: from the forward on, and from the gradient for the input on.
    """

    kept: float
    passing: float = 0.0
    weights: tuple[int, int] = (0, 0)
    is_swiglu: bool = False
    """True if SwiGLU may be computed in other ways."""
    is_guessed: bool = False


SWIGLU = Activation(2, is_swiglu=True)
GELU = Activation(3)
GELU_APPROX = Activation(4)
"""Common activations; ``silu(gate) * up`` keeps the sigmoid, and silu."""
JOINED_SWIGLU = SWIGLU._replace(passing=4.0)
"""SwiGLU of one matrix's output: gradients of both halves, and the whole, which adapters scale."""

NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms of the hidden states in most families, before attention and before the MLP."""


class Linear(NamedTuple):
    """A linear layer from ``inputs`` to ``outputs``; ``source`` names its input, which it may share
    with others.

    ``experts`` matrices are stacked in one array, and a token passes through ``uses`` of them; 0 is
    a single matrix. ``applied`` are a token's input and output elements if all matrices have one
    input; mlx-lm has no LoRA for these.
    """

    source: str
    inputs: int
    outputs: int
    bias: bool = False
    experts: int = 0
    uses: int = 1
    applied: tuple[int, int] | None = None

    @property
    def elements(self) -> tuple[int, int]:
        """Input and output elements of a token, for all matrices that it passes."""
        return self.applied or (self.uses * self.inputs, self.uses * self.outputs)

    @property
    def stack(self) -> tuple[int, ...]:
        """The first side of the array of experts; none for a single matrix."""
        return (self.experts,) if self.experts else ()

    @property
    def copies(self) -> int:
        """The number of matrices: one, or one an expert."""
        return max(1, self.experts)

    @property
    def parameters(self) -> int:
        """The number of elements of all copies, with their biases."""
        return self.copies * self.outputs * (self.inputs + self.bias)


class Norm(NamedTuple):
    """A norm of vectors of ``size``, or one for each of ``heads``, of a token's ``elements``."""

    size: int
    elements: int
    bias: bool = False
    heads: int = 0

    @property
    def sides(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return (self.heads, self.size) if self.heads else (self.size,)


class Heads(NamedTuple):
    """The heads of attention: of queries, and of keys and values; and the elements of one. A cache
    keeps ``cached`` elements of a token. Values cut from a larger array keep ``joined`` more."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int
    cached: int
    joined: int = 0


NO_HEADS = Heads(0, 0, 0, 0, 0)


PIECE = 64
"""Tokens of a piece of a recurrence: its gradient keeps one state a piece."""


class Recurrence(NamedTuple):
    """Sizes of a recurrence, and of what a cache keeps of a sequence, however long it is: elements
    of the model's type, and ``wide`` ones, always float32.

    It has ``convolved`` channels, and a ``state`` a piece; ``passing`` elements pass for each token
    of the piece that is computed, from token to token if it ``loops``.
    """

    cached: int = 0
    wide: int = 0
    convolved: int = 0
    state: int = 0
    passing: int = 0
    loops: bool = False

    def cache_nbytes(self, dtype_bytes: int) -> int:
        """Return the bytes that a cache keeps of a sequence, with elements of this size."""
        return dtype_bytes * self.cached + 4 * self.wide


NO_RECURRENCE = Recurrence()


FUSED_WIDTHS = frozenset({(96, 64), *((width, width) for width in (64, 72, 80, 96, 128, 192, 256))})
"""Elements of keys and values of a head, for which MLX has fused attention on Metal: mlx 0.32.4
names them where ``force_fused`` asks for others."""


def fuses_attention(
    length: int, window: int | None, widths: tuple[int, int], *, is_packed: bool, has_sinks: bool
) -> bool:
    """Tell whether MLX on Metal computes attention and its gradient without holding the scores: of
    rows of one causal sequence, padded at its end or not, whose ``window`` leaves out no token."""
    is_causal = not is_packed and (window is None or window >= length)
    return is_causal and not has_sinks and widths in FUSED_WIDTHS


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a decoder layer.

    ``linears`` and ``norms`` are by path in the layer, ``arrays`` the shapes of all other
    parameters. ``window`` is the number of tokens that attention sees, None for all before.
    """

    linears: tuple[tuple[str, Linear], ...]
    norms: tuple[tuple[str, Norm], ...] = ()
    heads: Heads = NO_HEADS
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    window: int | None = None
    activation: Activation = SWIGLU
    scores: int = 1
    """Arrays that attention keeps of its scores: the probabilities and their origin."""
    score_weights: int = 0
    """Arrays of scores that wait for gradients of weights that attention adds to them."""
    recurrence: Recurrence = NO_RECURRENCE
    kept: int = 0
    """Elements of a token kept for parts not listed: norms without a weight, or sums."""

    @cached_property
    def mlp(self) -> int:
        """The width between up and down, summed over a token's experts."""
        return sum(
            each.uses * each.inputs for _, each in self.linears if each.source.startswith("product")
        )

    @property
    def width(self) -> int:
        """Width of the MLP, or of one expert."""
        expert = self._expert
        return self.mlp if expert is None else expert.outputs

    @property
    def experts(self) -> int:
        """The number of experts; 0 for a layer without them."""
        return 0 if self._expert is None else self._expert.experts

    @property
    def experts_per_token(self) -> int:
        """The experts that a token passes through; 0 for a layer without them."""
        return 0 if self._expert is None else self._expert.uses

    @cached_property
    def _expert(self) -> Linear | None:
        return next((each for _, each in self.linears if each.source == "experts"), None)

    @property
    def is_parallel(self) -> bool:
        """True if the MLP takes the input of attention, and both are added up at once."""
        own = any(each.source in ("mlp", "experts") for _, each in self.linears)
        return self.mlp > 0 and not own

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all arrays of the layer."""
        linears = sum(each.parameters for _, each in self.linears)
        norms = sum(math.prod(norm.sides) * (1 + norm.bias) for _, norm in self.norms)
        return linears + norms + sum(math.prod(sides) for _, sides in self.arrays)

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters that one token passes through."""
        idle = sum(
            each.parameters // each.copies * (each.copies - each.uses) for _, each in self.linears
        )
        return self.parameters - idle

    def flops(self, sequence_length: int) -> float:
        """Return FLOPs of one token's forward, averaged over the sequence."""
        products = sum(each.uses * each.inputs * each.outputs for _, each in self.linears)
        seen = mean_context(sequence_length, self.window)
        heads = self.heads
        # Scores, and their weighted values.
        return 2 * (products + heads.queries * (heads.key_dim + heads.value_dim) * seen)


def mean_context(length: int, window: int | None) -> float:
    """Return the mean, over positions from 0, of the tokens seen: min(position + 1, window)."""
    if window is None or window >= length:
        return (length + 1) / 2
    return window * (window + 1) / (2 * length) + (length - window) * window / length
