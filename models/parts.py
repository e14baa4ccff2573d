"""Find the parts of a model of mlx-lm, and check that stages can run its layers apart.

The check runs the model's own code once, on a few tokens, with stand-ins for its modules: they
record the order of calls, and return arrays that tell them apart. No weight is read. A model can be
cut if each layer is called once, in order, and takes only one array of hidden states from the
layers before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from shardmlx.errors import UserError
from shardmlx.models.carried import carrier_of
from shardmlx.models.families import ANOTHER


class Parts(NamedTuple):
    """The parts of mlx-lm's model, by path or by name in the module that has them.

    The ``body`` has the embedding, and calls layers and final norm; ``top`` calls it and the head.
    """

    body: nn.Module
    top: nn.Module
    body_name: str
    layers_name: str
    embedding_name: str
    layers_path: str
    embedding_path: str
    before: Mapping[str, nn.Module]
    """Modules that the body calls before the layers, beside the embedding."""
    norms: Mapping[str, nn.Module]
    """Modules that the body calls after the layers: the final norm."""
    heads: Mapping[str, nn.Module]
    """The head; empty if the embedding is the lm_head too."""
    body_has_head: bool
    """True if the body calls the head, and gives logits."""
    caches: tuple[int | None, ...]
    """Number of each layer's cache among mlx-lm's; None for a layer without one."""

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = at(self.body, self.layers_name)
        return layers

    @property
    def embedding(self) -> nn.Module:
        embedding: nn.Module = self.body[self.embedding_name]
        return embedding

    @property
    def vocabulary(self) -> int:
        return int(_without_adapters(self.embedding).weight.shape[0])

    @property
    def ends(self) -> Mapping[str, nn.Module]:
        """Modules by path outside of the layers, but the embedding."""
        return {**self.before, **self.norms, **self.heads}


class InPlaceOf:
    """A function called in place of a module, with its attributes except those given."""

    def __init__(self, module: Any, call: Callable[..., Any], **attributes: Any) -> None:
        self._module, self._call, self._attributes = module, call, attributes

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the module, by which some code chooses a mask."""
        return type(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self._attributes
        return own[name] if name in own else getattr(self._module, name)


def at(model: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        model = model[int(name)] if isinstance(model, list) else model[name]
    return model


def with_part(module: nn.Module, path: str, part: Any) -> nn.Module:
    """Return a copy of a module that has another ``part`` at a path; all else is shared."""
    name, _, rest = path.partition(".")
    own = copy(module)
    own[name] = with_part(module[name], rest, part) if rest else part
    return own


def with_layers(body: nn.Module, layers_name: str, layer: Callable[..., mx.array]) -> nn.Module:
    """Return a copy of a body that calls ``layer`` with a layer's number in the place of each."""
    carrier = carrier_of(body)
    calls = (partial(layer, i) for i in range(len(at(body, layers_name))))
    stand_ins = [
        InPlaceOf(each, carrier.stand_in(call) if carrier else call)
        for each, call in zip(at(body, layers_name), calls, strict=True)
    ]
    own = with_part(body, layers_name, stand_ins)
    if carrier:
        carrier.simplify(own)
    return own


def first_argument(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model of mlx-lm. Raises ``UserError`` if it cannot be cut."""
    try:
        return _find(model)
    except _CannotBeCutError as error:
        kind = getattr(model, "model_type", None)
        raise UserError(
            f"mlx-lm's model of type {kind!r} cannot be cut into stages: {error}",
            f"run it with mlx-lm on one machine, or {ANOTHER}",
        ) from None


class _CannotBeCutError(Exception):
    """Error: the reason why a model cannot be cut."""


def _find(model: nn.Module) -> Parts:
    list_path = _path_of_layers(model)
    body_path = list_path
    while not _embeddings(at(model, body_path)):
        body_path, dot, _ = body_path.rpartition(".")
        if not dot:
            raise _CannotBeCutError("no module around its layers has an embedding")
    top_path, _, body_name = body_path.rpartition(".")
    body, top = at(model, body_path), at(model, top_path)
    layers_name = list_path[len(body_path) + 1 :]
    if any(isinstance(value, mx.array) for key, value in body.items() if key[0] != "_"):
        raise _CannotBeCutError("it has numbers of its own beside those of its modules")
    caches = make_prompt_cache(model)
    traces = [_trace(body, layers_name, caches, seed) for seed in (1, 2)]
    found = traces[0]
    _check(traces)
    own, above = f"{body_path}.", f"{top_path}.".lstrip(".")
    known = (found.embedding, *found.before, layers_name.partition(".")[0])
    others = [name for name in _with_weights(body) if name not in known]
    heads = {own + name: body[name] for name in others if name in found.heads}
    if not found.heads:
        heads = {above + name: top[name] for name in _with_weights(top) if name != body_name}
    return Parts(
        body=body,
        top=top,
        body_name=body_name,
        layers_name=layers_name,
        embedding_name=found.embedding,
        layers_path=list_path,
        embedding_path=own + found.embedding,
        before={own + name: body[name] for name in found.before},
        norms={own + name: body[name] for name in others if name not in found.heads},
        heads=heads,
        body_has_head=bool(found.heads),
        caches=tuple(found.caches),
    )


def _path_of_layers(model: nn.Module) -> str:
    layers = [*map(id, getattr(model, "layers", None) or ())]
    for path, module in model.named_modules():
        for name, child in module.items() if layers and path else ():
            if isinstance(child, list) and [*map(id, child)] == layers:
                return f"{path}.{name}"
    raise _CannotBeCutError("its layers are not one list")


def _embeddings(part: Any) -> list[str]:
    items = part.items() if isinstance(part, nn.Module) else ()
    return [name for name, child in items if hasattr(child, "as_linear")]


def _with_weights(module: nn.Module) -> list[str]:
    children = module.items()
    modules = [(name, child) for name, child in children if isinstance(child, nn.Module)]
    return [name for name, child in modules if tree_flatten(child.parameters())]


@dataclass
class _Trace:
    caches: list[int | None] = field(default_factory=list)
    given: list[list[Any]] = field(default_factory=list)
    """Arguments of each layer beside hidden states and its cache."""
    embedding: str = ""
    before: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    states: mx.array | None = None
    """Output of the last layer."""
    result: Any = None


def _trace(body: nn.Module, layers_name: str, caches: Sequence[Any], seed: int) -> _Trace:
    """Run the code of ``body`` over stand-ins, whose numbers depend on ``seed``."""
    layers = at(body, layers_name)
    tokens = mx.full((1, 3), seed, mx.int32)
    trace, carrier = _Trace(), carrier_of(body)
    shape = (*tokens.shape, _width(next(body[name] for name in _embeddings(body))))
    # The last layer's output is the same for each seed.
    numbers = [1000 * seed + 1 + i for i in range(len(layers) - 1)] + [0]

    def embed(name: str, ids: Any, *args: Any, **kwargs: Any) -> mx.array:
        if ids is tokens and not trace.embedding:
            trace.embedding = name
        elif name not in trace.before:
            trace.before.append(name)
        return mx.array(_drawn(1000 * seed, shape))

    def tied(name: str, x: mx.array) -> mx.array:
        trace.heads.append(name)
        return x

    def call(name: str, is_matrix: bool, *args: Any, **kwargs: Any) -> Any:
        if trace.given and is_matrix:
            trace.heads.append(name)
        elif not trace.given and name not in trace.before:
            trace.before.append(name)
        return first_argument(*args, **kwargs)

    def layer(i: int, *args: Any, **kwargs: Any) -> mx.array:
        x, others = first_argument(*args, **kwargs), [*args, *kwargs.values()][1:]
        if i != len(trace.given):
            raise _CannotBeCutError("its layers are not called once each, in order")
        if not isinstance(x, mx.array) or x.shape != shape:
            raise _CannotBeCutError("its layers take more than one array of hidden states")
        is_own = x is trace.states and x.dtype == mx.float32
        if i and not (is_own and np.array_equal(np.array(x), _drawn(numbers[i - 1], shape))):
            raise _CannotBeCutError("it computes with hidden states between its layers")
        own = [k for k, cache in enumerate(caches) if any(each is cache for each in others)]
        trace.caches.append(own[0] if own else None)
        trace.given.append([each for each in others if not any(each is c for c in caches)])
        trace.states = mx.array(_drawn(numbers[i], shape))
        return trace.states

    own = with_layers(body, layers_name, layer)
    trace.before.extend(carrier.before if carrier else ())
    for name in _with_weights(body):
        child = body[name]
        if hasattr(child, "as_linear"):
            own[name] = InPlaceOf(child, partial(embed, name), as_linear=partial(tied, name))
        elif name != layers_name.partition(".")[0]:
            is_matrix = any(array.ndim > 1 for _, array in tree_flatten(child.parameters()))
            own[name] = InPlaceOf(child, partial(call, name, is_matrix))
    try:
        trace.result = own(tokens, cache=[*caches])
    except (ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise _CannotBeCutError(f"its layers pass on more than hidden states ({error})") from None
    return trace


def _drawn(number: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(shape, np.float32)


def _without_adapters(embedding: Any) -> Any:
    return getattr(embedding, "embedding", embedding)


def _width(embedding: Any) -> int:
    embedding = _without_adapters(embedding)
    dims = getattr(embedding, "dims", None)
    return int(embedding.weight.shape[-1] if dims is None else dims)


def _check(traces: Sequence[_Trace]) -> None:
    """Raise ``_CannotBeCutError`` unless only hidden states pass from layer to layer."""
    one, other = traces
    if not one.given:
        raise _CannotBeCutError("it does not call its layers one by one")
    if not one.embedding:
        raise _CannotBeCutError("its embedding does not take tokens")
    own = [each for each in one.caches if each is not None]
    if len({*own}) < len(own):
        raise _CannotBeCutError("several of its layers have one cache")
    if not _same(one.given, other.given):
        raise _CannotBeCutError("its layers take more than one array of hidden states")
    if not isinstance(one.result, mx.array) or not _same(one.result, other.result):
        raise _CannotBeCutError("it takes more than what the last layer gives")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        return a.shape == b.shape and bool(mx.array_equal(a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, (int, float, str, type(None))):
        return type(a) is type(b)
    return bool(a == b)
