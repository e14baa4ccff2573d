"""The sizes of a layer by the calls of its modules.

Names and sizes are exact, and which modules share an input. How many arrays attention and MLP keep
for the gradient is not seen, so times and the memory of activations are approximate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from shardmlx.models.sizes.kv_cache import parts_of
from shardmlx.models.sizes.layer_calls import TOKENS, LayerCalls, is_linear
from shardmlx.models.sizes.layer_shape import (
    GELU,
    GELU_APPROX,
    JOINED_SWIGLU,
    NO_HEADS,
    PIECE,
    SWIGLU,
    Activation,
    Heads,
    LayerShape,
    Linear,
    Norm,
    Recurrence,
)
from shardmlx.models.sizes.shape import Sides

STATES, MATRICES = 2, 14
"""Arrays that pass in a piece of a recurrence: states of each token, decayed and then updated, or
matrices of each head."""

ACTIVATIONS = {
    "swiglu": (SWIGLU, SWIGLU),
    **dict.fromkeys(("relu2", "relu_squared"), (Activation(0), Activation(0))),
    # The gradients of alpha sum over as many numbers.
    "xielu": (Activation(0.35, passing=4, weights=(2, 4)),) * 2,
    "gelu": (Activation(1), GELU),
    "gelu_approx": (Activation(2), GELU_APPROX),
    # Clipped gate and up, up again plus one, and the arrays of swiglu.
    "swiglu_oai": (Activation(5, passing=3),) * 2,
}
"""Activations by the name of MLX's function: alone, and with a gate."""


def traced_layer(recorded: LayerCalls, x: mx.array, cache: Any) -> LayerShape:
    """Return the sizes of a layer that was called with hidden states ``x`` and a cache."""
    sides = dict(recorded.sides)
    norms = _norms(recorded, sides)
    linears = _linears(recorded, sides)
    recurrence = _recurrence(recorded, cache)
    heads = _heads(recorded, linears, cache)
    # A single number of a token weighs the answer of shared experts.
    weighed = sum(x.shape[-1] for each in linears.values() if each.outputs == 1)
    return LayerShape(
        linears=tuple(linears.items()),
        norms=tuple(norms.items()),
        arrays=tuple(sides.items()),
        heads=heads,
        window=getattr(cache, "max_size", None),
        activation=_activation(recorded, linears),
        # A sink's share of the scores.
        score_weights=int(recorded.has_sinks),
        recurrence=recurrence,
        kept=recorded.normed
        + weighed
        + _kept_by_gate(linears, heads)
        + _kept(recorded, linears, recurrence),
    )


def _norms(recorded: LayerCalls, sides: dict[str, Sides]) -> dict[str, Norm]:
    """Return the norms that were called, by path; take their arrays out of ``sides``."""
    norms: dict[str, Norm] = {}
    for path, out in recorded.outputs.items():
        if is_linear(recorded.modules[path]):
            continue
        # One weight for each head may be a row of an array, or a module.
        weights = [each for each in sides if re.fullmatch(rf"{path}\.(.+\.)?weight", each)]
        for name in weights:
            *heads, width = sides.pop(name)
            own = name.removesuffix(".weight")
            has_bias = sides.pop(f"{own}.bias", None) is not None
            norms[own] = Norm(width, out.size // TOKENS // len(weights), has_bias, *heads)
    return norms


def _linears(recorded: LayerCalls, sides: dict[str, Sides]) -> dict[str, Linear]:
    """Return the linear layers that were called, by path; take their arrays out of ``sides``."""
    linears: dict[str, Linear] = {}
    sources = _Sources(recorded)
    for path in recorded.linears:
        module = recorded.modules[path]
        given = recorded.given[path]
        out = recorded.outputs[path]
        *experts, outputs, width = sides.pop(f"{path}.weight")
        has_bias = sides.pop(f"{path}.bias", None) is not None
        is_adapted = isinstance(module, (nn.Linear, SwitchLinear))
        linears[path] = Linear(
            sources.of(path, is_of_experts=bool(experts)),
            width,
            outputs,
            has_bias,
            experts=sum(experts),
            uses=out.size // out.shape[-1] // TOKENS if experts else 1,
            applied=None if is_adapted else (given.size // TOKENS, out.size // TOKENS),
        )
    return linears


class _Sources:
    """Names of the arrays that linear layers take: layers with one name take the same array."""

    def __init__(self, recorded: LayerCalls) -> None:
        self._given = recorded.given
        self._mixed = recorded.mixed
        self._lasts = {mixer: path for path, mixer in self._mixed.items()}
        self._names: dict[int, str] = {}
        self._firsts: dict[str, mx.array] = {}

    def of(self, path: str, *, is_of_experts: bool) -> str:
        """Return the name of what the linear layer at a path takes; ask in the order of calls."""
        given = self._given[path]
        parent = path.rpartition(".")[0]
        is_mixed = path in self._mixed
        if given is self._firsts.setdefault(parent, given):
            kind = "attention" if is_mixed else "experts" if is_of_experts else "mlp"
            name = f"{kind} of {parent}" if kind in self._names.values() else kind
            return self._names.setdefault(id(given), name)
        if not is_mixed:
            return f"product of {parent}"
        # The last matrix makes the output.
        is_last = path == self._lasts[self._mixed[path]]
        name = f"values of {parent}" if is_last else f"latent of {path}"
        return self._names.setdefault(id(given), name)


def _activation(recorded: LayerCalls, linears: Mapping[str, Linear]) -> Activation:
    """Return the activation by the name of the function that the MLP calls."""
    (name, *_) = [*recorded.activations, ""]
    alone, gated = ACTIVATIONS.get(name, (Activation(2, is_guessed=True),) * 2)
    has_gate = is_joined = False
    for each in linears.values():
        if each.source.startswith("product of "):
            parent = each.source.removeprefix("product of ")
            beside = [own for path, own in linears.items() if path.rpartition(".")[0] == parent]
            has_gate |= len(beside) > 2
            is_joined |= len(beside) == 2 and beside[0].outputs == 2 * each.inputs
    return JOINED_SWIGLU if is_joined and gated is SWIGLU else gated if has_gate else alone


def _recurrence(recorded: LayerCalls, cache: Any) -> Recurrence:
    """Return the sizes of a layer's recurrence, of which the cache keeps the last state."""
    fixed = [getattr(part, "state", ()) for part in parts_of(cache) if not hasattr(part, "offset")]
    arrays = [array for _, array in tree_flatten(fixed) if array is not None]
    wide = sum(array.size for array in arrays if array.dtype == mx.float32)
    found = Recurrence(
        cached=sum(array.size for array in arrays) - wide,
        wide=wide,
        convolved=sum(array.shape[-1] for array in arrays if array.ndim == 3),
    )
    states = [array for array in arrays if array.ndim == 4]
    if len(states) != 1:  # none, or keys and values before the first of a short convolution
        return found._replace(convolved=found.convolved + sum(array.size for array in states))
    (state,) = states
    if recorded.has_matrices:
        passing = MATRICES * state.shape[1] * PIECE
        return found._replace(state=state.size, passing=passing)
    return found._replace(state=state.size, passing=STATES * state.size, loops=True)


def _kept_by_gate(linears: Mapping[str, Linear], heads: Heads) -> int:
    """Return the elements of a token that a gate of attention's outputs keeps: itself, and these.
    A matrix of its own makes it, or that of the queries, of which the whole is then kept."""
    made = [each.outputs for each in linears.values() if each.source == "attention"]
    queries = heads.queries * heads.key_dim
    outputs = heads.queries * heads.value_dim
    others = heads.keys * (heads.key_dim + heads.value_dim)
    if not outputs or sum(made) - queries - others not in (outputs, heads.queries):
        return 0
    return 2 * outputs + (outputs if queries + outputs in made else 0)


def _kept(recorded: LayerCalls, linears: Mapping[str, Linear], recurrence: Recurrence) -> int:
    """Return the elements of a token that a recurrent part keeps: outputs of its matrices and
    convolutions; beside a state, also two arrays of the activation after these, and two of the gate
    of the output."""
    inner = [
        each
        for path, each in linears.items()
        if any(path.startswith(f"{mixer}.") for mixer in recorded.recurrent)
    ]
    kept = recurrence.convolved + sum(each.outputs for each in inner if not _makes_output(each))
    if not recurrence.state:
        return kept
    gated = sum(each.inputs for each in inner if _makes_output(each))
    return kept + 2 * (recurrence.convolved + gated)


def _makes_output(linear: Linear) -> bool:
    return linear.source.startswith("values")


def _heads(recorded: LayerCalls, linears: Mapping[str, Linear], cache: Any) -> Heads:
    """Return the heads that attention was called with, or those of which the cache has keys."""
    kept = [each.state[:2] for each in parts_of(cache) if hasattr(each, "offset")]
    # Caches have room for further tokens.
    used = [array for pair in kept for array in pair if array is not None]
    cached = sum(array.size // array.shape[-2] for array in used)
    if not (cached or recorded.attended):
        return NO_HEADS
    keys, values = recorded.attended[0][1:3] if recorded.attended else kept[0]
    (_, groups, _, key), (*_, value) = keys.shape, values.shape
    if recorded.attended:
        queries = recorded.attended[0][0].shape[1]
        if has_scores(recorded.attended[0][3]):
            # A cache keeps the keys of these scores in the place of values.
            key += kept[0][1].shape[-1]
    else:
        queries = max(each.inputs for each in linears.values() if _makes_output(each)) // value
    # Values cut from a larger array keep all of it.
    made = [
        each.uses * each.outputs
        for each in linears.values()
        if each.source.startswith(("attention", "latent"))
    ]
    whole = groups * value if groups * value in made else max(made, default=0)
    return Heads(queries, groups, key, value, cached, max(0, whole - groups * value))


def has_scores(mask: Any) -> bool:
    """Return whether a mask has scores, of other keys, which latent attention adds to its own."""
    return isinstance(mask, mx.array) and mx.issubdtype(mask.dtype, mx.floating)
