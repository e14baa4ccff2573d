"""Read the shape of an undeclared model by running mlx-lm's own code of it, over lazy arrays.

A stand-in for each module of a layer records what it takes and gives. Names and sizes are exact,
and which modules share an input. How many arrays attention and MLP keep for the gradient is not
seen, so times and the memory of activations are approximate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import MODEL_REMAPPING

from shardmlx.compat import calls, rebind
from shardmlx.errors import FAULTS, UserError, one_line, refusing
from shardmlx.models.families import ANOTHER
from shardmlx.models.family import Family
from shardmlx.models.runtime.attention import ChunkedMask, attend
from shardmlx.models.runtime.carried import first_argument
from shardmlx.models.runtime.decoder import ATTENTION, POSITIONED, Decoder, LayerCall
from shardmlx.models.runtime.parts import find_parts
from shardmlx.models.runtime.recurrence import use_chunks
from shardmlx.models.runtime.ropes import STATIC, fit_ropes
from shardmlx.models.runtime.stand_ins import InPlaceOf, at
from shardmlx.models.sizes.config_reader import Config
from shardmlx.models.sizes.kv_cache import parts_of
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
from shardmlx.models.sizes.shape import ModelShape, Names

TOKENS = 3
"""Tokens of the trace: so few that mlx-lm does not sort them by expert."""

STATES, MATRICES = 2, 14
"""Arrays that pass in a piece of a recurrence: states of each token, decayed and then updated, or
matrices of each head."""

Sides = tuple[int, ...]

_ACTIVATIONS = {
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

_NORMS = ("rms_norm", "layer_norm")

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "moe_top_k",
)
"""Names of the number of experts, and of those that a token passes through."""

_DIVISORS = ("num_attention_heads", "num_key_value_heads", "n_group", "n_groups", "mamba_n_groups")
"""Counts by which mlx-lm divides: MLX ends the process where it reshapes to 0 groups."""


def build_random(config: Mapping[str, Any]) -> nn.Module:
    """Build mlx-lm's model of a config.json with random weights, lazily. Raises ``UserError``."""
    model_type = config.get("model_type")
    text = config.get("text_config")
    for fields in (Config(config), Config(text if isinstance(text, Mapping) else {})):
        for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
            fields.count(key, 1)
        for key in _DIVISORS:
            if fields.get(key) == 0:  # some list a number for each layer
                fields.count(key)
        numbers = [fields.get(key) for key in _EXPERTS]
        experts = max((each for each in numbers if isinstance(each, int)), default=0)
        for key in _PER_TOKEN:
            # Dense models may have the field, too, and some list a number for each layer.
            if experts > 1 and not isinstance(fields.get(key), list):
                fields.count(key, 1, experts)
    try:
        with refusing(f"mlx-lm cannot build this model of type {model_type!r}", ANOTHER):
            code = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
            # Some families write into the fields of their configuration.
            model: nn.Module = code.Model(code.ModelArgs.from_dict(deepcopy(dict(config))))
    except (ImportError, SystemExit):  # a model of mlx-lm exits where a package is missing
        raise UserError(f"mlx-lm has no model of type {model_type!r}", ANOTHER) from None
    # Without this each array hangs on the keys of all random ones before, which a trace visits.
    mx.eval(mx.random.state)
    fit_ropes(model, config)
    return model


def traced_shape(config: Mapping[str, Any], stored: Mapping[str, Sides]) -> ModelShape:
    """Return the shape of an undeclared model, with names as in its files, if any are ``stored``.

    Raises ``UserError`` if mlx-lm lacks the model, or its layers are not separate."""
    model = build_random(config)
    model.set_dtype(mx.bfloat16)  # some states stay float32
    parts = find_parts(model)
    caches = make_prompt_cache(model)
    decoder = Decoder(model, 0, len(parts.layers), parts)
    recorded = [_Calls(layer) for layer in parts.layers]
    layers: list[LayerShape] = []
    widths: list[int] = []

    def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
        # A compiled call is traced, and may not read a number.
        mx.compile(call)(x)
        number = parts.caches[i]
        layers.append(_shape(recorded[i], x, None if number is None else caches[number]))
        widths.append(x.shape[-1])
        return x

    try:
        decoder.run(
            mx.zeros((1, TOKENS), mx.int32), visit, caches=[caches[i] for i in decoder.caches]
        )
    except FAULTS as error:
        kind = config.get("model_type")
        # MLX names no cause in the model.
        reads = "its layers read numbers while they compute" if "to eval an" in str(error) else ""
        fault = f"mlx-lm cannot run this model of type {kind!r}: {reads or one_line(error)}"
        raise UserError(fault, ANOTHER) from None
    after = _sides(parts.norms)
    (norm, *_) = [*(path for path, sides in after.items() if len(sides) == 1), ""]
    (head, *_) = [*parts.heads, ""]
    names = Names(f"{parts.layers_path}.", parts.embedding_path, norm, head)
    # Others choose among the keys by their places in a row, which in a batch begins with padding.
    attends_to_all = [len(each.attended) for each in recorded] == [
        0 if number is None else sum(hasattr(each, "offset") for each in parts_of(caches[number]))
        for number in parts.caches
    ]
    kept = [each for cache in caches for each in parts_of(cache)]
    are_merged = all(hasattr(each, "merge") for each in kept)
    loaded = _loaded(model, stored)
    own = {name for name, _ in tree_flatten(model.parameters())}
    is_stored_so = not stored or f"{names.embedding}.weight" in stored
    stored_names = {} if is_stored_so else _stored_names(loaded, names.embedding)
    before = _sides(parts.before)
    # Layers know no other position than that of their ropes.
    is_plain = all(isinstance(each, POSITIONED) for each in caches) and (
        not parts.before or parts.carrier.width > parts.width
    )
    masks = _masks(decoder, recorded) if is_plain else [None]
    takes_pieces = all(isinstance(each, ChunkedMask) for each in masks)
    takes_packed = all(isinstance(each, ChunkedMask) or _has_scores(each) for each in masks)
    modules = [each for layer in parts.layers for each in layer.modules()]
    ropes = [each for each in modules if _takes(each, "offset") and not _takes(each, "cache")]
    seen = Family(
        norm_bias="bias" in parts.norms.get(norm, ()),
        head_has_bias="bias" in parts.heads.get(head, ()),
        takes_pieces=takes_pieces,
        takes_packed=takes_packed,
        takes_batches=takes_packed or (attends_to_all and are_merged and not parts.before),
        takes_cuts=all(isinstance(each, POSITIONED) for each in kept),
    )
    return ModelShape.of_layers(
        layers,
        model_type=str(config.get("model_type")),
        is_declared=False,
        hidden_size=parts.width,
        before=tuple((_stored_path(path, stored_names), sides) for path, sides in before.items()),
        after=tuple(
            (_stored_path(path, stored_names), sides)
            for path, sides in after.items()
            if path != norm
        ),
        carried_size=max(widths) - parts.width,
        vocab_size=parts.vocabulary,
        tied=not parts.heads,
        names=_names_by(stored_names, names) if stored_names else names,
        has_dynamic_rope=not all(isinstance(each, STATIC) for each in ropes),
        family=seen,
        chooses_caches=hasattr(model, "make_cache"),
        untrained=_fault_of_gradient(decoder, layers),
        unchanged=frozenset(name for name, origin in loaded.items() if name == origin),
        refused=frozenset(origin or name for name, origin in loaded.items() if name not in own),
    )


def _sides(modules: Mapping[str, nn.Module]) -> dict[str, Sides]:
    """Return the sides of each weight in modules, by the path of its own."""
    return {
        f"{path}.{name}".strip("."): module.weight.shape
        for path, holder in modules.items()
        for name, module in holder.named_modules()
        if "weight" in module
    }


def _fault_of_gradient(decoder: Decoder, layers: Sequence[LayerShape]) -> str:
    """Return why layers cannot be trained; empty if they can."""

    def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
        if layers[i] not in layers[:i]:
            use_chunks(decoder.layers[i])
            mx.vjp(call, [x], [x])
        return x

    if any(_loops(*each) for layer in layers for each in layer.arrays):
        return "mlx-lm computes its layers token by token, and a gradient would hold many states"
    try:
        decoder.run(mx.zeros((1, TOKENS), mx.int32), visit)
    except FAULTS as error:
        return one_line(error)
    return ""


def _loops(path: str, sides: Sides) -> bool:
    """Return whether an array is of a first Mamba, or of a gated linear recurrence."""
    return "rg_lru" in path or (path.endswith("A_log") and len(sides) == 2)


def _loaded(model: nn.Module, stored: Mapping[str, Sides]) -> dict[str, str]:
    """Return the names that mlx-lm's code gives arrays of such sides as it loads them, each with
    its stored name, empty where numbers are changed; none if it does not load them."""
    arrays = {name: mx.zeros(sides) for name, sides in stored.items()}
    before = {id(array): name for name, array in arrays.items()}
    try:
        loaded = model.sanitize(dict(arrays)) if hasattr(model, "sanitize") else arrays
    except FAULTS:
        return {}
    return {name: before.get(id(array), "") for name, array in loaded.items()}


def _stored_names(loaded: Mapping[str, str], embedding: str) -> dict[str, str]:
    """Return the stored names of what is ``loaded``, also of arrays whose numbers are changed;
    empty if the embedding is not among them."""
    names = {name: origin for name, origin in loaded.items() if origin}
    if (whole := f"{embedding}.weight") not in names:
        return {}
    body, stored_body = (each.rsplit(".", 2)[0] for each in (whole, names[whole]))
    # Where numbers are changed, as those of norms, the name is that of the embedding's module.
    changed = [name for name in loaded if name not in names and name.startswith(body)]
    return names | {name: f"{stored_body}{name.removeprefix(body)}" for name in changed}


def _names_by(stored_names: Mapping[str, str], names: Names) -> Names:
    """Return the stored form of names."""
    in_layer = next(name for name in stored_names if name.startswith(f"{names.layers}0."))
    others = (_stored_path(name, stored_names) for name in names[1:])
    return Names(f"{stored_names[in_layer].partition('.0.')[0]}.", *others)


def _stored_path(path: str, stored_names: Mapping[str, str]) -> str:
    """Return the stored form of a module's path; empty if its weight is not there."""
    name = f"{path}.weight"
    return stored_names.get(name, "" if stored_names else name).removesuffix(".weight")


class _Calls:
    """Calls of a layer's modules and of its attention, from now on."""

    def __init__(self, layer: nn.Module) -> None:
        named = [*layer.named_modules()]
        self.sides = {path: array.shape for path, array in tree_flatten(layer.parameters())}
        self.mixers = [
            path
            for path, each in named
            if path and _takes(each, "cache") and (_attends(each) or not _goes_up_and_down(each))
        ]
        self.recurrent = [path for path in self.mixers if not _attends(at(layer, path))]
        self.has_matrices = any(calls(each, "ssm_update", "_ssm") for _, each in named)
        self.activations = {name for name in _ACTIVATIONS for _, each in named if calls(each, name)}
        self.modules = {path: each for path, each in named if _is_counted(each)}
        self.given: dict[str, mx.array] = {}
        self.outputs: dict[str, mx.array] = {}
        self.attended: list[tuple[mx.array, mx.array, mx.array, Any]] = []
        """Queries, keys, values and mask."""
        self.has_sinks = False
        self.normed = 0
        """Elements of a token that attention norms without weights."""
        norms = {name: partial(self._norm, getattr(mx.fast, name)) for name in _NORMS}
        watched = InPlaceOf(mx, mx.array, fast=InPlaceOf(mx.fast, mx.array, **norms))
        for path, module in named:
            if calls(module, ATTENTION):
                rebind(module, ATTENTION, self._attention)
            if (
                path in self.mixers
                and path not in self.recurrent
                and _norms(module)
                and calls(module, "mx")
            ):
                rebind(module, "mx", watched)
        # Children first: a stand-in has none.
        for path, module in reversed(self.modules.items()):
            parent, _, name = path.rpartition(".")
            holder = at(layer, parent)
            stand_in = InPlaceOf(module, partial(self._call, path))
            holder[int(name) if isinstance(holder, list) else name] = stand_in

    def _call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        out = self.modules[path](*args, **kwargs)
        self.given.setdefault(path, first_argument(*args, **kwargs))
        self.outputs.setdefault(path, out)
        return out

    def _norm(self, norm: Callable[..., mx.array], x: mx.array, *args: Any, **how: Any) -> mx.array:
        self.normed += x.size // TOKENS
        return norm(x, *args, **how)

    def _attention(self, q: Any, k: Any, v: Any, *args: Any, **how: Any) -> mx.array:
        self.attended.append((q, k, v, how["mask"]))
        self.has_sinks |= how.get("sinks") is not None
        return attend(q, k, v, *args, **how)


def _masks(decoder: Decoder, recorded: Sequence[_Calls]) -> list[Any]:
    """Return the mask with which each layer attends where we ask for pieces: ours, or one that it
    makes of it. None stands for a layer that does not attend once."""

    def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
        recorded[i].attended.clear()
        call(x)
        return x

    try:
        decoder.run(mx.zeros((1, TOKENS), mx.int32), visit, chunk=1)
    except FAULTS:
        return [None]
    masks = [[mask for *_, mask in each.attended] for each in recorded]
    return [each[0] if len(each) == 1 else None for each in masks]


def _has_scores(mask: Any) -> bool:
    """Return whether a mask has scores, of other keys, which latent attention adds to its own."""
    return isinstance(mask, mx.array) and mx.issubdtype(mask.dtype, mx.floating)


def _shape(recorded: _Calls, x: mx.array, cache: Any) -> LayerShape:
    """Return the sizes of a layer that was called with hidden states ``x`` and a cache."""
    sides, recurrence = recorded.sides, _recurrence(recorded, cache)
    linears: dict[str, Linear] = {}
    norms: dict[str, Norm] = {}
    sources: dict[int, str] = {}
    firsts: dict[str, mx.array] = {}
    mixed = {
        path: mixer
        for mixer in recorded.mixers
        for path in recorded.given
        if path.startswith(f"{mixer}.") and _is_linear(recorded.modules[path])
    }
    lasts = {mixer: path for path, mixer in mixed.items()}
    for path, given in recorded.given.items():
        module, out = recorded.modules[path], recorded.outputs[path]
        if not _is_linear(module):
            # One weight for each head may be a row of an array, or a module.
            weights = [each for each in sides if re.fullmatch(rf"{path}\.(.+\.)?weight", each)]
            for name in weights:
                *heads, width = sides.pop(name)
                own = name.removesuffix(".weight")
                has_bias = sides.pop(f"{own}.bias", None) is not None
                norms[own] = Norm(width, out.size // TOKENS // len(weights), has_bias, *heads)
            continue
        *rows, width = sides.pop(f"{path}.weight")
        has_bias = sides.pop(f"{path}.bias", None) is not None
        *experts, outputs = rows
        parent = path.rpartition(".")[0]
        kind = "experts" if experts else "mlp"
        kind = "attention" if path in mixed else kind
        if given is firsts.setdefault(parent, given):
            name = f"{kind} of {parent}" if kind in sources.values() else kind
            source = sources.setdefault(id(given), name)
        elif kind == "attention":
            # The last matrix makes the output.
            name = f"values of {parent}" if path == lasts[mixed[path]] else f"latent of {path}"
            source = sources.setdefault(id(given), name)
        else:
            source = f"product of {parent}"
        is_adapted = isinstance(module, (nn.Linear, SwitchLinear))
        linears[path] = Linear(
            source,
            width,
            outputs,
            has_bias,
            experts=sum(experts),
            uses=out.size // out.shape[-1] // TOKENS if experts else 1,
            applied=None if is_adapted else (given.size // TOKENS, out.size // TOKENS),
        )
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


def _activation(recorded: _Calls, linears: Mapping[str, Linear]) -> Activation:
    """Return the activation by the name of the function that the MLP calls."""
    (name, *_) = [*recorded.activations, ""]
    alone, gated = _ACTIVATIONS.get(name, (Activation(2, is_guessed=True),) * 2)
    has_gate = is_joined = False
    for each in linears.values():
        if each.source.startswith("product of "):
            parent = each.source.removeprefix("product of ")
            beside = [own for path, own in linears.items() if path.rpartition(".")[0] == parent]
            has_gate |= len(beside) > 2
            is_joined |= len(beside) == 2 and beside[0].outputs == 2 * each.inputs
    return JOINED_SWIGLU if is_joined and gated is SWIGLU else gated if has_gate else alone


def _recurrence(recorded: _Calls, cache: Any) -> Recurrence:
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
    queries, outputs = heads.queries * heads.key_dim, heads.queries * heads.value_dim
    others = heads.keys * (heads.key_dim + heads.value_dim)
    if not outputs or sum(made) - queries - others not in (outputs, heads.queries):
        return 0
    return 2 * outputs + (outputs if queries + outputs in made else 0)


def _kept(recorded: _Calls, linears: Mapping[str, Linear], recurrence: Recurrence) -> int:
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


def _attends(module: nn.Module) -> bool:
    return any(calls(each, ATTENTION) for each in module.modules())


def _is_counted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a norm."""
    if "weight" in module and (_is_linear(module) or module.weight.ndim == 1):
        return True
    has_linears = any(map(_is_linear, module.modules()))
    return _norms(module) and not has_linears and bool(module.parameters())


def _goes_up_and_down(module: nn.Module) -> bool:
    """Return whether a module is an MLP without a gate. That of RWKV takes a cache, too."""
    sides = [each.weight.shape for each in module.modules() if _is_linear(each)]
    return len(sides) == 2 and sides[0] == sides[1][::-1]


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized")


def _norms(module: nn.Module) -> bool:
    """Return whether the code of a module calls a norm of MLX."""
    return any(calls(module, name) for name in _NORMS)


def _takes(module: nn.Module, name: str) -> bool:
    """Return whether a module takes a ``cache``, as attention and recurrent layers do, or an
    ``offset``, as rotary embeddings."""
    return name in signature(type(module).__call__).parameters


def _heads(recorded: _Calls, linears: Mapping[str, Linear], cache: Any) -> Heads:
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
        if _has_scores(recorded.attended[0][3]):
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
