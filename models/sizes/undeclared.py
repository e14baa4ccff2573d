"""Read the shape of an undeclared model by running mlx-lm's own code of it, over lazy arrays.

A stand-in for each module of a layer records what it takes and gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from shardmlx.errors import FAULTS, UserError, one_line, refusing
from shardmlx.models.families import ANOTHER
from shardmlx.models.family import Family
from shardmlx.models.runtime.attention import ChunkedMask
from shardmlx.models.runtime.decoder import POSITIONED, Decoder, LayerCall
from shardmlx.models.runtime.parts import Parts, find_parts
from shardmlx.models.runtime.recurrence import use_chunks
from shardmlx.models.runtime.ropes import STATIC, fit_ropes
from shardmlx.models.sizes.config_reader import Config
from shardmlx.models.sizes.kv_cache import parts_of
from shardmlx.models.sizes.layer_calls import TOKENS, LayerCalls, takes
from shardmlx.models.sizes.layer_shape import LayerShape
from shardmlx.models.sizes.shape import ModelShape, Names, Sides
from shardmlx.models.sizes.stored_names import StoredNames
from shardmlx.models.sizes.traced_layer import ACTIVATIONS, has_scores, traced_layer

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
    _check_counts(Config(config))
    _check_counts(Config(text if isinstance(text, Mapping) else {}))
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


def _check_counts(fields: Config) -> None:
    """Raise ``UserError`` for a number with which mlx-lm would end the process, or hang."""
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


def traced_shape(config: Mapping[str, Any], stored: Mapping[str, Sides]) -> ModelShape:
    """Return the shape of an undeclared model, with names as in its files, if any are ``stored``.

    Raises ``UserError`` if mlx-lm lacks the model, or its layers are not separate."""
    model = build_random(config)
    model.set_dtype(mx.bfloat16)  # some states stay float32
    trace = _run(model, config.get("model_type"))
    parts = trace.parts
    after = _sides(parts.norms)
    norm = next((path for path, sides in after.items() if len(sides) == 1), "")
    head = next(iter(parts.heads), "")
    others = {path: sides for path, sides in after.items() if path != norm}
    names = StoredNames.of(model, stored, parts.embedding_path)
    return ModelShape.of_layers(
        trace.layers,
        model_type=str(config.get("model_type")),
        is_declared=False,
        hidden_size=parts.width,
        before=names.sides(_sides(parts.before)),
        after=names.sides(others),
        carried_size=max(trace.widths) - parts.width,
        vocab_size=parts.vocabulary,
        tied=not parts.heads,
        names=names.names(Names(f"{parts.layers_path}.", parts.embedding_path, norm, head)),
        has_dynamic_rope=_has_dynamic_rope(parts.layers),
        family=_family(trace, norm, head),
        chooses_caches=hasattr(model, "make_cache"),
        untrained=_fault_of_gradient(trace.decoder, trace.layers),
        unchanged=names.unchanged,
        refused=names.refused,
    )


@dataclass(frozen=True, slots=True)
class _Trace:
    """A model whose layers have run: their calls, their sizes, and the widths of what they took;
    ``caches`` are those of the model."""

    parts: Parts
    decoder: Decoder
    caches: Sequence[Any]
    recorded: Sequence[LayerCalls]
    layers: Sequence[LayerShape]
    widths: Sequence[int]

    def cache_of(self, number: int | None) -> Any:
        """Return the model's cache of this number; None for None."""
        return None if number is None else self.caches[number]


def _run(model: nn.Module, kind: object) -> _Trace:
    """Run the layers of a model of a kind. Raises ``UserError`` if mlx-lm's code does not run."""
    parts = find_parts(model)
    caches = make_prompt_cache(model)
    decoder = Decoder(model, 0, len(parts.layers), parts)
    recorded = [LayerCalls(layer, ACTIVATIONS) for layer in parts.layers]
    layers: list[LayerShape] = []
    widths: list[int] = []
    trace = _Trace(parts, decoder, caches, recorded, layers, widths)

    def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
        # A compiled call is traced, and may not read a number.
        mx.compile(call)(x)
        layers.append(traced_layer(recorded[i], x, trace.cache_of(parts.caches[i])))
        widths.append(x.shape[-1])
        return x

    tokens = mx.zeros((1, TOKENS), mx.int32)
    try:
        decoder.run(tokens, visit, caches=[trace.caches[i] for i in decoder.caches])
    except FAULTS as error:
        # MLX names no cause in the model.
        reads = "its layers read numbers while they compute" if "to eval an" in str(error) else ""
        fault = f"mlx-lm cannot run this model of type {kind!r}: {reads or one_line(error)}"
        raise UserError(fault, ANOTHER) from None
    return trace


def _family(trace: _Trace, norm: str, head: str) -> Family:
    """Return the facts that the code of a model tells, with its final norm and its head at these
    paths."""
    parts = trace.parts
    # Others choose among the keys by their places in a row, which in a batch begins with padding.
    attends_to_all = all(
        len(calls.attended) == sum(hasattr(each, "offset") for each in parts_of(cache))
        for calls, cache in zip(trace.recorded, map(trace.cache_of, parts.caches), strict=True)
    )
    kept = [each for cache in trace.caches for each in parts_of(cache)]
    are_merged = all(hasattr(each, "merge") for each in kept)
    masks = _masks(trace)
    takes_packed = all(isinstance(each, ChunkedMask) or has_scores(each) for each in masks)
    return Family(
        norm_bias="bias" in parts.norms.get(norm, ()),
        head_has_bias="bias" in parts.heads.get(head, ()),
        takes_pieces=all(isinstance(each, ChunkedMask) for each in masks),
        takes_packed=takes_packed,
        takes_batches=takes_packed or (attends_to_all and are_merged and not parts.before),
        takes_cuts=all(isinstance(each, POSITIONED) for each in kept),
    )


def _masks(trace: _Trace) -> list[Any]:
    """Return the mask with which each layer attends where we ask for pieces: ours, or one that it
    makes of it. None stands for a layer that does not attend once, or knows another position than
    that of its ropes."""
    parts = trace.parts
    has_positions = bool(parts.before) and parts.carrier.width <= parts.width
    if has_positions or not all(isinstance(each, POSITIONED) for each in trace.caches):
        return [None]

    def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
        trace.recorded[i].attended.clear()
        call(x)
        return x

    try:
        trace.decoder.run(mx.zeros((1, TOKENS), mx.int32), visit, chunk=1)
    except FAULTS:
        return [None]
    masks = [[mask for *_, mask in each.attended] for each in trace.recorded]
    return [each[0] if len(each) == 1 else None for each in masks]


def _has_dynamic_rope(layers: Sequence[nn.Module]) -> bool:
    """Return whether a rotary embedding of layers changes with the length of the text."""
    modules = [each for layer in layers for each in layer.modules()]
    ropes = [each for each in modules if takes(each, "offset") and not takes(each, "cache")]
    return not all(isinstance(each, STATIC) for each in ropes)


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
