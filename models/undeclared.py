"""Read the shape of an undeclared model by running mlx-lm's own code of it, over lazy arrays.

A stand-in for each module of a layer records what it takes and gives. Names and sizes are exact,
and which modules share an input. How many arrays a layer keeps for its gradient is not seen, so
times and the memory of activations are approximate.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import MODEL_REMAPPING

from shardmlx.compat import calls, rebind
from shardmlx.errors import UserError, one_line
from shardmlx.models.attention import attend
from shardmlx.models.decoder import ATTENTION, Decoder, LayerCall
from shardmlx.models.families import ANOTHER
from shardmlx.models.family import UNDECLARED
from shardmlx.models.layer_kinds import no_windows, windows_by_type
from shardmlx.models.layer_shape import (
    NO_HEADS,
    SWIGLU,
    Activation,
    Heads,
    LayerShape,
    Linear,
    Norm,
)
from shardmlx.models.parts import InPlaceOf, at, find_parts, first_argument
from shardmlx.models.ropes import ROPES, fit_ropes
from shardmlx.models.shape import ModelShape, Names

TOKENS = 3
"""Tokens of the trace: so few that mlx-lm does not sort them by expert."""

Sides = tuple[int, ...]


def build_random(config: Mapping[str, Any]) -> nn.Module:
    """Build mlx-lm's model of a config.json with random weights, lazily. Raises ``UserError``."""
    model_type = config.get("model_type")
    try:
        code = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
        # Some families write into the fields of their configuration.
        model: nn.Module = code.Model(code.ModelArgs.from_dict(deepcopy(dict(config))))
    except ImportError:
        raise UserError(f"mlx-lm has no model of type {model_type!r}", ANOTHER) from None
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        fault = f"mlx-lm cannot build this model of type {model_type!r}: {one_line(error)}"
        raise UserError(fault, ANOTHER) from None
    fit_ropes(model, config)
    return model


def traced_shape(config: Mapping[str, Any], stored: Mapping[str, Sides]) -> ModelShape:
    """Return the shape of an undeclared model, with names as in its files, if any are ``stored``.

    Raises ``UserError`` if mlx-lm lacks the model, or its layers are not separate."""
    model = build_random(config)
    parts = find_parts(model)
    caches = make_prompt_cache(model)
    decoder = Decoder(model, 0, len(parts.layers), parts)
    layers: list[LayerShape] = []
    widths: set[int] = set()
    masks: list[Any] = []

    def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
        number = parts.caches[i]
        cache = None if number is None else caches[number]
        layers.append(_shape(parts.layers[i], call, x, cache, masks))
        widths.add(x.shape[-1])
        return x

    decoder.run(mx.zeros((1, TOKENS), mx.int32), visit, caches=[caches[i] for i in decoder.caches])
    (norm, *_), (head, *_) = [*parts.norms, ""], [*parts.heads, ""]
    names = Names(f"{parts.layers_path}.", parts.embedding_path, norm, head)
    # Layers use masks as they come, and know no other position than that of their ropes.
    is_plain = (
        [type(mask) for mask in masks] == [str] * len(layers)
        and all(isinstance(each, (KVCache, RotatingKVCache)) for each in caches)
        and not parts.before
    )
    ropes = [each for layer in parts.layers for each in layer.modules() if _takes(each, "offset")]
    seen = replace(
        UNDECLARED,
        windows=windows_by_type() if hasattr(model, "make_cache") else no_windows,
        norm_bias="bias" in parts.norms.get(norm, ()),
        head_has_bias="bias" in parts.heads.get(head, ()),
        takes_pieces=is_plain,
        takes_packed=is_plain,
        takes_batches=is_plain,
    )
    return ModelShape.of_layers(
        layers,
        model_type=str(config.get("model_type")),
        text_type="",
        hidden_size=max(widths),
        vocab_size=parts.vocabulary,
        tied=not parts.heads,
        names=_stored_names(model, names, stored),
        has_dynamic_rope=not all(isinstance(each, ROPES) for each in ropes),
        seen=seen,
        token_by_token=any(_loops(*each) for layer in layers for each in layer.arrays),
    )


def _loops(path: str, sides: tuple[int, ...]) -> bool:
    """Return whether an array is of a first Mamba, or of a gated linear recurrence."""
    return "rg_lru" in path or (path.endswith("A_log") and len(sides) == 2)


def _stored_names(model: nn.Module, names: Names, stored: Mapping[str, Sides]) -> Names:
    """Return the names that mlx-lm's code replaces by these as it loads arrays of such sides."""
    if not stored or f"{names.embedding}.weight" in stored:
        return names
    arrays = {name: mx.zeros(sides) for name, sides in stored.items()}
    before = {id(array): name for name, array in arrays.items()}
    loaded = {name: before.get(id(a), name) for name, a in model.sanitize(dict(arrays)).items()}
    in_layer = next(name for name in loaded if name.startswith(names.layers))
    first, *others = (
        loaded.get(f"{name}.weight", "").removesuffix(".weight") for name in names[1:]
    )
    return Names(loaded[in_layer].partition("0.")[0], first, *others)


@dataclass
class _Calls:
    """Calls of a layer's modules by path, and of its attention, in order."""

    modules: Mapping[str, nn.Module]
    given: dict[str, mx.array] = field(default_factory=dict)
    outputs: dict[str, mx.array] = field(default_factory=dict)
    attended: list[tuple[mx.array, mx.array, mx.array, Any]] = field(default_factory=list)
    """Queries, keys, values and mask."""

    def module(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.given.setdefault(path, first_argument(*args, **kwargs))
        return self.outputs.setdefault(path, self.modules[path](*args, **kwargs))

    def attention(self, q: Any, k: Any, v: Any, *args: Any, **how: Any) -> mx.array:
        self.attended.append((q, k, v, how["mask"]))
        return attend(q, k, v, *args, **how)


def _recorded(layer: nn.Module, call: LayerCall, x: mx.array) -> _Calls:
    calls_of = _Calls({path: each for path, each in layer.named_modules() if _is_counted(each)})
    for module in layer.modules():
        if calls(module, ATTENTION):
            rebind(module, ATTENTION, calls_of.attention)
    for path, module in calls_of.modules.items():
        parent, _, name = path.rpartition(".")
        holder = at(layer, parent)
        stand_in = InPlaceOf(module, partial(calls_of.module, path))
        holder[int(name) if isinstance(holder, list) else name] = stand_in
    call(x)
    return calls_of


def _shape(
    layer: nn.Module, call: LayerCall, x: mx.array, cache: Any, masks: list[Any]
) -> LayerShape:
    """Return the sizes of a layer, and add the masks of its attention to ``masks``."""
    sides = {path: array.shape for path, array in tree_flatten(layer.parameters())}
    mixers = [path for path, each in layer.named_modules() if path and _takes(each, "cache")]
    has_swiglu = any(calls(each, "swiglu") for each in layer.modules())
    recorded = _recorded(layer, call, x)
    masks += [mask for *_, mask in recorded.attended]
    linears: dict[str, Linear] = {}
    norms: dict[str, Norm] = {}
    sources: dict[int, str] = {}
    firsts: dict[str, mx.array] = {}
    for path, given in recorded.given.items():
        module, out = recorded.modules[path], recorded.outputs[path]
        *rows, width = sides.pop(f"{path}.weight")
        has_bias = sides.pop(f"{path}.bias", None) is not None
        if not rows:
            norms[path] = Norm(width, out.size // TOKENS, has_bias)
            continue
        *experts, outputs = rows
        parent = path.rpartition(".")[0]
        kind = "experts" if experts else "mlp"
        kind = "attention" if any(path.startswith(f"{each}.") for each in mixers) else kind
        if given is firsts.setdefault(parent, given):
            name = f"{kind} of {parent}" if kind in sources.values() else kind
            source = sources.setdefault(id(given), name)
        elif kind == "attention":
            source = "values" if outputs == x.shape[-1] else f"latent of {parent}"
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
    return LayerShape(
        linears=tuple(linears.items()),
        norms=tuple(norms.items()),
        arrays=tuple(sides.items()),
        heads=_heads(recorded, linears, cache),
        window=getattr(cache, "max_size", None),
        activation=SWIGLU if has_swiglu else Activation(2),
    )


def _is_counted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a norm."""
    return "weight" in module and (hasattr(module, "to_quantized") or module.weight.ndim == 1)


def _takes(module: nn.Module, name: str) -> bool:
    """Return whether a module takes a ``cache``, as attention and recurrent layers do, or an
    ``offset``, as rotary embeddings."""
    return name in signature(type(module).__call__).parameters


def _heads(recorded: _Calls, linears: Mapping[str, Linear], cache: Any) -> Heads:
    """Return the heads that attention was called with, or those of which the cache has keys."""
    kept = [each.state[:2] for each in getattr(cache, "caches", [cache]) if hasattr(each, "offset")]
    # Caches have room for further tokens.
    cached = sum(array.size // array.shape[-2] for pair in kept for array in pair)
    if not cached:
        return NO_HEADS
    keys, values = recorded.attended[0][1:3] if recorded.attended else kept[0]
    (_, groups, _, key), (*_, value) = keys.shape, values.shape
    if recorded.attended:
        queries = recorded.attended[0][0].shape[1]
    else:
        queries = max(each.inputs for each in linears.values() if each.source == "values") // value
    joined = [each.outputs for each in linears.values() if each.source == "attention"]
    beside = (queries + groups) * key if len(joined) == 1 and joined[0] > queries * key else 0
    return Heads(queries, groups, key, value, cached, beside)
