"""Sizes of one decoder layer, and the blocks that families build theirs from. No MLX, no MPI.

A matrix product of m x k by k x n counts 2 m k n FLOPs; norms, activations and rotary embedding are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardmlx.errors import UserError
from shardmlx.models.config_reader import AGAIN, Config

WINDOWED, FULL = "sliding_attention", "full_attention"


class Activation(NamedTuple):
    """The function between an MLP's products: ``kept`` are the arrays of its width that mlx-lm
    keeps for the gradient beside gate and up. SwiGLU may be computed in other ways. ``is_long``
    functions take many more operations than SwiGLU."""

    kept: float
    is_swiglu: bool = False
    is_long: bool = False

    @property
    def without_gate(self) -> Activation:
        """The same function in an MLP without a gate, which keeps neither gate nor up."""
        return Activation(self.kept - 2, is_long=self.is_long)


SWIGLU, GELU = Activation(2, is_swiglu=True), Activation(3, is_long=True)
GELU_APPROX = Activation(4, is_long=True)
"""Common activations; ``silu(gate) * up`` keeps the sigmoid, and silu."""

NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms of the hidden states in most families, before attention and before the MLP."""


class Linear(NamedTuple):
    """A linear layer from ``inputs`` to ``outputs``; ``source`` names its input, which it may share
    with others.

    ``experts`` matrices are stacked in one array, and a token passes through ``uses`` of them; 0 is
    a single matrix. ``stored`` is the path of one expert's matrix in Hugging Face's files, with
    ``{}`` for its number. ``applied`` are a token's input and output elements if all matrices have
    one input; mlx-lm has no LoRA for these.
    """

    source: str
    inputs: int
    outputs: int
    bias: bool = False
    experts: int = 0
    uses: int = 1
    stored: str = ""
    applied: tuple[int, int] | None = None

    @property
    def elements(self) -> tuple[int, int]:
        """Input and output elements of a token, for all matrices that it passes."""
        return self.applied or (self.uses * self.inputs, self.uses * self.outputs)

    @property
    def copies(self) -> int:
        """Number of its matrices."""
        return max(1, self.experts)

    @property
    def parameters(self) -> int:
        return self.copies * self.outputs * (self.inputs + self.bias)


class Norm(NamedTuple):
    """A norm of vectors of ``size``; ``elements`` are its elements of a token, in all heads. It may
    have its own weights for each of ``heads``."""

    size: int
    elements: int
    bias: bool = False
    heads: int = 0

    @property
    def sides(self) -> tuple[int, ...]:
        """Shape of its weight."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of a decoder layer.

    ``linears`` and ``norms`` are by path in the layer, ``arrays`` the shapes of all other
    parameters. ``window`` is the number of tokens that attention sees, None for all before. ``mlp``
    is the width between up and down, summed over a token's experts.
    """

    linears: tuple[tuple[str, Linear], ...]
    norms: tuple[tuple[str, Norm], ...]
    heads: Heads
    mlp: int
    window: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    activation: Activation = SWIGLU
    activation_weights: tuple[int, int] = (0, 0)
    """Arrays of that width that it keeps for the gradients of its own weights, if these are
    trained: from the forward on, and from the gradient for the input on."""
    passing: float = 0.0
    """Temporary arrays of that width in the backward, beyond those of SwiGLU."""
    scores: int = 1
    """Arrays that attention keeps of its scores: the probabilities and their origin."""
    score_weights: int = 0
    """Arrays of scores that wait for gradients of weights that attention adds to them."""
    kept: int = 0
    """Elements of a token kept by the forward for parts not listed: norms without a weight, or
    sums."""

    @property
    def width(self) -> int:
        """Width of the MLP, or of one expert."""
        return next(
            (each.outputs for _, each in self.linears if each.source == "experts"), self.mlp
        )

    @property
    def is_parallel(self) -> bool:
        """True if the MLP takes the input of attention, and both are added up at once."""
        return not any(each.source in ("mlp", "experts") for _, each in self.linears)

    @property
    def is_latent(self) -> bool:
        """True if keys and values are made of a smaller state."""
        return any(each.source == "latent" for _, each in self.linears)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        linears = sum(each.parameters for _, each in self.linears)
        norms = sum(math.prod(norm.sides) * (1 + norm.bias) for _, norm in self.norms)
        return linears + norms + sum(math.prod(sides) for _, sides in self.arrays)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token passes through."""
        idle = sum(
            each.parameters // each.copies * (each.copies - each.uses) for _, each in self.linears
        )
        return self.parameters - idle

    def seeing(self, length: int) -> LayerShape:
        """Return the layer without its window if texts of ``length`` tokens fit in it."""
        return replace(self, window=None) if (self.window or 0) >= length else self

    def flops(self, sequence_length: int) -> float:
        """Return FLOPs of one token's forward, averaged over the sequence.

        Causal attention sees (length + 1) / 2 tokens in the mean, fewer through a window.
        """
        products = sum(each.uses * each.inputs * each.outputs for _, each in self.linears)
        seen = mean_context(sequence_length, self.window)
        heads = self.heads
        # Scores, and their weighted values.
        return 2 * (products + heads.queries * (heads.key_dim + heads.value_dim) * seen)


def mean_context(length: int, window: int | None) -> float:
    """Return the mean, over positions from 0, of the tokens seen: min(position + 1, window)."""
    if length < 1:
        raise ValueError(f"a sequence of {length} tokens")
    if window is None or window >= length:
        return (length + 1) / 2
    return window * (window + 1) / (2 * length) + (length - window) * window / length


# Blocks


class Block(NamedTuple):
    """A part of a layer: linear layers, norms and other arrays by path."""

    linears: Mapping[str, Linear]
    norms: Mapping[str, Norm] = {}
    arrays: Mapping[str, tuple[int, ...]] = {}


class Attention(NamedTuple):
    """A block with the heads of its attention."""

    block: Block
    heads: Heads


class MLP(NamedTuple):
    """A block with its width, and its experts."""

    block: Block
    width: int
    experts: int = 0
    experts_per_token: int = 0
    passing: float = 0.0
    """Number of arrays, as in ``LayerShape.passing``."""


def layer_of(
    hidden: int,
    attention: Attention,
    mlp: MLP,
    *,
    norms: tuple[str, ...] = NORMS,
    norm_bias: bool = False,
    window: int | None = None,
    activation: Activation = SWIGLU,
    scores: int = 1,
) -> LayerShape:
    """Return a layer of attention and MLP, with ``norms`` of the hidden states."""
    named = {name: Norm(hidden, hidden, norm_bias) for name in norms}
    blocks = (Block({}, named), attention.block, mlp.block)
    return LayerShape(
        linears=tuple(pair for block in blocks for pair in block.linears.items()),
        norms=tuple(pair for block in blocks for pair in block.norms.items()),
        arrays=tuple(pair for block in blocks for pair in block.arrays.items()),
        heads=attention.heads,
        mlp=mlp.width,
        window=window,
        experts=mlp.experts,
        experts_per_token=mlp.experts_per_token,
        activation=activation,
        passing=mlp.passing,
        scores=scores,
    )


def head_dim(config: Config) -> int:
    """Return ``head_dim`` if it is given, else the hidden size divided by the heads."""
    if config.get("head_dim") is not None:
        return config.count("head_dim")
    return config.share("hidden_size", "num_attention_heads")


def kv_heads(config: Config) -> int:
    """Return ``num_key_value_heads``, or as many as there are of queries."""
    return config.count("num_key_value_heads", config.count("num_attention_heads"))


def grouped_attention(
    config: Config,
    dim: int,
    groups: int,
    *,
    bias: bool = False,
    output_bias: bool = False,
    norms: str = "",
    norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    path: str = "self_attn",
    output: str = "o_proj",
) -> Attention:
    """Return attention of ``groups`` heads of keys and values, of ``dim`` elements each.

    ``norms`` of queries and keys are of each ``head``, or of all heads as a ``whole``.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if heads % groups:
        raise UserError(
            f"config.json: num_attention_heads {heads} is not divisible by "
            f"num_key_value_heads {groups}",
            AGAIN,
        )
    queries, keys = heads * dim, groups * dim
    linears = {
        f"{path}.q_proj": Linear("attention", hidden, queries, bias),
        f"{path}.k_proj": Linear("attention", hidden, keys, bias),
        f"{path}.v_proj": Linear("attention", hidden, keys, bias),
        f"{path}.{output}": Linear("values", queries, hidden, output_bias),
    }
    sizes = {"head": (dim, dim), "whole": (queries, keys)}.get(norms)
    named = {}
    if sizes is not None:
        of_queries, of_keys = norm_names
        named = {
            f"{path}.{of_queries}": Norm(sizes[0], queries),
            f"{path}.{of_keys}": Norm(sizes[1], keys),
        }
    return Attention(Block(linears, named), Heads(heads, groups, dim, dim, 2 * keys))


def fused(
    attention: Attention,
    *,
    name: str = "qkv_proj",
    path: str = "self_attn",
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
) -> Attention:
    """Return attention whose queries, keys and values come from one matrix."""
    linears = dict(attention.block.linears)
    parts = [linears.pop(f"{path}.{part}") for part in names]
    one = parts[0]._replace(outputs=sum(part.outputs for part in parts))
    block = attention.block._replace(linears={f"{path}.{name}": one, **linears})
    joined = parts[0].outputs + parts[1].outputs
    return Attention(block, attention.heads._replace(joined=joined))


def swiglu(
    hidden: int,
    width: int,
    *,
    path: str = "mlp",
    bias: bool = False,
    source: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> MLP:
    """Return a gated MLP of ``width``."""
    gate, up, down = names
    linears = {
        f"{path}.{gate}": Linear(source, hidden, width, bias),
        f"{path}.{up}": Linear(source, hidden, width, bias),
        f"{path}.{down}": Linear(f"product of {path}", width, hidden, bias),
    }
    return MLP(Block(linears), width)


def fused_swiglu(hidden: int, width: int, *, path: str = "mlp") -> MLP:
    """Return a gated MLP of ``width`` whose gate and up projection are one matrix."""
    linears = {
        f"{path}.gate_up_proj": Linear("mlp", hidden, 2 * width),
        f"{path}.down_proj": Linear(f"product of {path}", width, hidden),
    }
    # The gradients of both halves, and the whole gradient, which adapters scale.
    return MLP(Block(linears), width, passing=4)


def plain_mlp(
    hidden: int,
    width: int,
    *,
    names: tuple[str, str] = ("up_proj", "down_proj"),
    path: str = "mlp",
    bias: bool = False,
    source: str = "mlp",
) -> MLP:
    """Return an MLP of ``width`` without a gate."""
    up, down = names
    linears = {
        f"{path}.{up}": Linear(source, hidden, width, bias),
        f"{path}.{down}": Linear(f"activations of {path}", width, hidden, bias),
    }
    return MLP(Block(linears), width)


def windows(config: Config) -> list[int | None]:
    """Return the window of each layer, as ``layer_types`` says; mlx-lm ignores a bare
    ``sliding_window``."""
    count = config.count("num_hidden_layers")
    kinds = config.each_layer("layer_types")
    if kinds is None:
        return [None] * count
    for kind in kinds:
        if kind not in (FULL, WINDOWED):
            raise UserError(
                f"config.json: layer_types names {kind!r}",
                f"only {FULL} and {WINDOWED} are supported",
            )
    if FULL not in kinds:
        raise UserError(f"config.json: layer_types has no {FULL}", "mlx-lm needs one")
    if WINDOWED not in kinds:
        return [None] * count
    window = config.count("sliding_window")
    return [window if kind == WINDOWED else None for kind in kinds]


def every_nth_full(config: Config, period: int) -> list[int | None]:
    """Return the window of each layer; the last one of each ``period`` has none."""
    count = config.count("num_hidden_layers")
    if period > count:
        raise UserError(
            f"config.json: {count} layers are fewer than the {period} of sliding_window_pattern",
            "mlx-lm needs a layer of each kind",
        )
    window = config.count("sliding_window")
    return [window if (i + 1) % period else None for i in range(count)]
