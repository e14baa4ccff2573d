"""Run mlx-lm's code of a model over stand-ins for its modules, to find what its layers take.

The stand-ins record the order of calls, and return arrays that tell them apart, so that each
argument of a layer shows where it comes from. The layers themselves run only where they pass on
more than one array, and lazily. No weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from shardmlx.errors import FAULTS
from shardmlx.models.runtime.carried import (
    HIDDEN,
    CarriedSource,
    Carrier,
    HiddenStates,
    Layout,
    Shared,
    first_argument,
)

_SIZE = (1, 3)
_LARGER = (2, 5)
"""Rows and tokens with which a model is examined; two sizes show the axes of an array."""


class InPlaceOf:
    """A function called in place of a module, with its attributes except those given."""

    def __init__(self, module: Any, call: Callable[..., Any], **attributes: Any) -> None:
        self._module = module
        self._call = call
        self._attributes = attributes

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
    """Return what a model has at a path with dots: a number is a place in a list."""
    for name in path.split(".") if path else ():
        model = model[int(name)] if isinstance(model, list) else model[name]
    return model


def with_part(module: nn.Module, path: str, part: Any) -> nn.Module:
    """Return a copy of a module that has another ``part`` at a path; all else is shared."""
    name, _, rest = path.partition(".")
    own = copy(module)
    key: Any = int(name) if isinstance(module, list) else name
    own[key] = with_part(module[key], rest, part) if rest else part
    return own


def with_layers(body: nn.Module, layers_name: str, layer: Callable[..., mx.array]) -> nn.Module:
    """Return a copy of a body that calls ``layer`` with a layer's number in the place of each."""
    layers = enumerate(at(body, layers_name))
    return with_part(body, layers_name, [InPlaceOf(e, partial(layer, i)) for i, e in layers])


def embeddings(part: Any) -> list[str]:
    """Return the names of the embeddings among a module's children."""
    items = part.items() if isinstance(part, nn.Module) else ()
    return [name for name, child in items if hasattr(child, "as_linear")]


def with_weights(module: nn.Module, but: str) -> dict[str, nn.Module]:
    """Return a module's children that have weights, and those in its lists, by name."""
    named: dict[str, Any] = {}
    for name, child in module.items():
        each = enumerate(child) if isinstance(child, list) else ()
        named |= {name: child, **{f"{name}.{i}": part for i, part in each}}
    return {
        name: child
        for name, child in named.items()
        if isinstance(child, nn.Module)
        and name.partition(".")[0] != but.partition(".")[0]
        and tree_flatten(child.parameters())
    }


def without_adapters(module: Any) -> Any:
    """Return the module that an adapter of mlx-lm's wraps, or the module itself."""
    return getattr(module, "embedding", getattr(module, "linear", module))


def width_of(embedding: Any) -> int:
    """Return the size of an embedded token, also of a packed embedding."""
    embedding = without_adapters(embedding)
    dims = getattr(embedding, "dims", None)
    return int(embedding.weight.shape[-1] if dims is None else dims)


class CannotBeCutError(Exception):
    """Error: the reason why a model cannot be cut."""


@dataclass
class Trace:
    """A record of what the code of a body does."""

    given: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of each layer by path, or the source of those that come from earlier layers."""
    caches: list[int | None] = field(default_factory=list)
    """The number of the cache to which each layer alone adds."""
    embedding: str = ""
    before: list[str] = field(default_factory=list)
    """The other modules that are called before the layers."""
    after: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    result: Any = None


def examine(body: nn.Module, layers_name: str, caches: Sequence[Any]) -> tuple[Trace, Carrier]:
    """Return what the code of a ``body`` does, and what its layers pass on. Raises
    ``CannotBeCutError``."""
    try:
        return _examine_hidden(body, layers_name, caches)
    except CannotBeCutError as error:
        reason = str(error)
    try:
        sizes = (_SIZE, _LARGER)
        calls, others = (_Calls(body, layers_name, deepcopy([*caches]), size) for size in sizes)
    except FAULTS:
        raise CannotBeCutError(reason) from None
    layouts: dict[CarriedSource, Layout] = {}
    for source, array in calls.arrays.items():
        layout = _layout(array.shape, others.arrays[source].shape)
        if layout is not None:
            layouts[source] = layout
    layouts[HIDDEN] = layouts[CarriedSource("output", 0)]
    traces = [
        _TracedBody(
            body=body,
            layers_name=layers_name,
            caches=caches,
            returned=calls.returned,
            layouts=layouts,
            seeds=seeds,
        ).run()
        for seeds in ((1, 1), (2, 1), (1, 2))
    ]
    return traces[0], Carrier(_sources(traces, calls.aliases), calls.returned, layouts)


def _examine_hidden(
    body: nn.Module, layers_name: str, caches: Sequence[Any]
) -> tuple[Trace, Carrier]:
    """Return what the code of a ``body`` does whose layers pass on hidden states alone. Raises
    ``CannotBeCutError``."""
    returned = [0] * len(at(body, layers_name))
    embedded = Layout((0, 1, 2), (width_of(next(body[name] for name in embeddings(body))),))
    layouts = {CarriedSource("output", i): embedded for i in range(len(returned))}
    traces = [
        _TracedBody(
            body=body,
            layers_name=layers_name,
            caches=caches,
            returned=returned,
            layouts=layouts,
            seeds=seeds,
        ).run()
        for seeds in ((1, 1), (2, 2), (1, 1))
    ]
    takes = _sources(traces, {})
    for i, sources in enumerate(takes):
        taken = {*sources.values()}
        if HIDDEN not in taken or taken - {HIDDEN, CarriedSource("cache", i)}:
            raise CannotBeCutError("its layers take more than one array of hidden states")
    return traces[0], HiddenStates(takes, returned, {HIDDEN: embedded})


@dataclass(frozen=True, kw_only=True)
class _TracedBody:
    """A body whose modules are stand-ins: their numbers depend on ``seeds``, those of what comes
    before the layers on the first, those of what layers return on the second.

    Layers return arrays as they ``returned``, of known ``layouts``.
    """

    body: nn.Module
    layers_name: str
    caches: Sequence[Any]
    returned: Sequence[Any]
    layouts: Mapping[CarriedSource, Layout]
    seeds: tuple[int, int]
    trace: Trace = field(default_factory=Trace)
    owners: dict[int, int] = field(default_factory=dict)
    """The layer that a cache was first given to, by the number of the cache."""
    drawn: dict[Any, CarriedSource] = field(default_factory=dict)
    """The source of each array that a layer has returned, by what tells it from others."""

    def run(self) -> Trace:
        """Run the code of the body. Raises ``CannotBeCutError``."""
        tokens = mx.full(_SIZE, self.seeds[0], mx.int32)
        own = with_layers(self.body, self.layers_name, self._layer)
        for name, child in with_weights(self.body, self.layers_name).items():
            if hasattr(child, "as_linear"):
                tied = partial(self._head, name)
                part = InPlaceOf(child, partial(self._embed, name, tokens), as_linear=tied)
            else:
                weight = without_adapters(child).get("weight")
                part = InPlaceOf(child, partial(self._call, name, weight))
            own = with_part(own, name, part)
        trace = self.trace
        try:
            trace.result = own(tokens, cache=[*self.caches])
        except FAULTS as error:
            if trace.given:
                reason = f"its layers pass on more than hidden states ({error})"
                raise CannotBeCutError(reason) from None
        if not trace.given:
            raise CannotBeCutError("it does not call its layers one by one")
        if not trace.embedding:
            raise CannotBeCutError("its embedding does not take tokens")
        return trace

    def _embed(self, name: str, tokens: mx.array, ids: Any, *args: Any, **kwargs: Any) -> mx.array:
        if ids is tokens and not self.trace.embedding:
            self.trace.embedding = name
        elif name not in self.trace.before:
            self.trace.before.append(name)
        return _drawn(self.seeds[0], (*_SIZE, width_of(self.body[name])))

    def _head(self, name: str, x: mx.array) -> mx.array:
        self.trace.heads.append(name)
        return x

    def _call(self, name: str, weight: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a module with a weight that is neither an embedding nor a layer."""
        x = first_argument(*args, **kwargs)
        is_matrix = weight is not None and weight.ndim > 1
        if self.trace.given and is_matrix and weight.shape[0] == self._vocabulary:
            return self._head(name, x)
        names = self.trace.after if self.trace.given else self.trace.before
        if name not in names:
            names.append(name)
        # In the width of the output, and other numbers for other inputs.
        return x.sum(-1, keepdims=True) + mx.arange(weight.shape[0]) if is_matrix else x

    def _layer(self, i: int, *args: Any, **kwargs: Any) -> Any:
        if i != len(self.trace.given):
            raise CannotBeCutError("its layers are not called once each, in order")
        x = first_argument(*args, **kwargs)
        hidden = self.layouts.get(CarriedSource("output", i))
        if not isinstance(x, mx.array) or hidden is None or x.shape != hidden.shape(*_SIZE):
            raise CannotBeCutError("its layers take more than one array of hidden states")
        self._record(i, tree_flatten((args, kwargs)))
        parts = count()
        return tree_map(lambda _: self._draw(i, next(parts)), self.returned[i])

    def _record(self, i: int, arguments: Sequence[tuple[str, Any]]) -> None:
        """Note what a layer is given, by path, and the cache to which it alone adds."""
        given: dict[str, Any] = {}
        own = None
        for path, leaf in arguments:
            number = next((k for k, cache in enumerate(self.caches) if cache is leaf), None)
            if number is None:
                given[path] = self.drawn.get(_key(leaf), leaf)
                continue
            owner = self.owners.setdefault(number, i)
            given[path] = CarriedSource("cache", owner)
            own = number if owner == i else None
        self.trace.given.append(given)
        self.trace.caches.append(own)

    def _draw(self, i: int, part: int) -> mx.array:
        """Return an array in the place of one that a layer returns."""
        source = CarriedSource("output", i, part)
        # The last layer's hidden states are the same for each seed.
        is_last = source == CarriedSource("output", len(self.returned) - 1)
        number = 0 if is_last else 1000 * (1000 * self.seeds[1] + i) + part + 1
        layout = self.layouts.get(source)
        array = _drawn(number, () if layout is None else layout.shape(*_SIZE))
        self.drawn[_key(array)] = source
        return array

    @property
    def _vocabulary(self) -> int:
        names = embeddings(self.body)
        return int(without_adapters(self.body[names[0]]).weight.shape[0])


class _Calls:
    """Calls of the real layers of a body, lazily, on a batch of this size: of what they return only
    shapes matter."""

    def __init__(
        self, body: nn.Module, layers_name: str, caches: Sequence[Any], size: tuple[int, int]
    ) -> None:
        self.returned: list[Any] = []
        self.arrays: dict[CarriedSource, mx.array] = {}
        self.aliases: dict[CarriedSource, CarriedSource] = {}
        """Keys, values and positions among what a layer returns."""
        self._layers = at(body, layers_name)
        self._recorded = {id(each): Shared(each) for each in caches if hasattr(each, "offset")}
        self._owners: dict[int, int] = {}
        """The first layer that took an object, by its id."""
        own = with_layers(body, layers_name, self._layer)
        own(mx.zeros(size, mx.int32), cache=[*caches])

    def _layer(self, i: int, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        _check_unshared(each for each in (*args, *kwargs.values()) if isinstance(each, dict))
        found: list[Any] = []
        # A compiled call is traced, and may not read a number.
        mx.compile(partial(self._call, i, found, (args, kwargs)))(x)
        returned = [leaf for _, leaf in tree_flatten(found[0])]
        _check_unshared(each for each in returned if not isinstance(each, mx.array))
        for path, leaf in tree_flatten(((x, *args), kwargs)):
            self._owners.setdefault(id(leaf), i)
            if isinstance(leaf, mx.array):
                self.arrays[CarriedSource("before", i, path)] = leaf
        self._take(i, returned)
        self.returned.append(tree_map(lambda leaf: mx.zeros(leaf.shape, leaf.dtype), found[0]))
        return self.returned[-1]

    def _call(self, i: int, found: list[Any], given: tuple[Any, Any], x: mx.array) -> mx.array:
        args, kwargs = tree_map(lambda leaf: self._recorded.get(id(leaf), leaf), given)
        found.append(self._layers[i](x, *args, **kwargs))
        return x

    def _take(self, i: int, returned: Sequence[mx.array]) -> None:
        """Note what layer ``i`` has added to its caches, and what it returned."""
        fetched: dict[int, CarriedSource] = {}
        for key, cache in self._recorded.items():
            if self._owners.get(key) != i:
                continue
            for part, added in enumerate(cache.added):
                source = CarriedSource("added", i, part)
                self.arrays[source] = added
                fetched[id(cache.fetched[part])] = source
        for part, leaf in enumerate(returned):
            source = CarriedSource("output", i, part)
            self.arrays[source] = leaf
            alias = fetched.get(id(leaf)) if leaf.ndim else CarriedSource("position", i)
            if alias is not None:
                self.aliases[source] = alias


def _check_unshared(objects: Iterable[Any]) -> None:
    for each in objects:
        raise CannotBeCutError(f"its layers share what each may change: a {type(each).__name__}")


def _layout(one: Sequence[int], other: Sequence[int]) -> Layout | None:
    """Return the axes of an array with these shapes at both sizes; None if it has no tokens."""
    pairs = [*zip(one, other, strict=True)]
    first = [pairs.index(size) for size in zip(_SIZE, _LARGER, strict=True) if size in pairs]
    others = [axis for axis in range(len(pairs)) if axis not in first]
    if len(first) < 2 or any(one[axis] != other[axis] for axis in others):
        return None
    return Layout((*first, *others), tuple(one[axis] for axis in others))


def _drawn(number: int, shape: tuple[int, ...]) -> mx.array:
    return mx.array(np.random.default_rng(number).standard_normal(shape, np.float32))


def _key(leaf: Any) -> Any:
    """Return what tells an array from others; None for other objects."""
    if not isinstance(leaf, mx.array):
        return None
    return leaf.shape, np.array(leaf.astype(mx.float32)).tobytes()


def _sources(
    traces: Sequence[Trace], aliases: Mapping[CarriedSource, CarriedSource]
) -> list[dict[str, CarriedSource]]:
    """Return where what each layer takes comes from. The second trace differs in what comes before
    the layers, the third in what layers return."""
    trace, of_tokens, of_layers = traces
    takes: list[dict[str, CarriedSource]] = []
    before: dict[Any, CarriedSource] = {}
    for i, given in enumerate(trace.given):
        sources = {}
        for path, leaf in given.items():
            own = of_tokens.given[i].get(path)
            other = of_layers.given[i].get(path)
            if isinstance(leaf, CarriedSource) and leaf == own == other:
                is_hidden = leaf == CarriedSource("output", i - 1)
                sources[path] = HIDDEN if is_hidden else aliases.get(leaf, leaf)
            elif not _same(leaf, other):
                raise CannotBeCutError("it computes with hidden states between its layers")
            elif not _same(leaf, own):
                source = before.setdefault(_key(leaf), CarriedSource("before", i, path))
                sources[path] = HIDDEN if i == 0 and not sources else source
        takes.append(sources)
    results = [each.result for each in traces]
    if not all(isinstance(each, mx.array) and _same(each, results[0]) for each in results):
        raise CannotBeCutError("it takes more than what the last layer gives")
    return takes


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        return a.shape == b.shape and bool(mx.array_equal(a, b))
    if not isinstance(a, (int, float, str, type(None))):
        return type(a) is type(b)
    return bool(a == b)
