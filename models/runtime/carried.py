"""Arrays that layers take beside hidden states, and how they cross a cut.

A layer may take what an earlier one returned beside its hidden states, keys and values that an
earlier one added to its cache, and what the body made of the tokens before the first layer. Between
any two layers all that is still needed stands behind the hidden states, in one array of one width::

    hidden states | keys of layer 1 | values of layer 1 | what layer 2 takes | what layer 3 takes

So stages send one array, as those of any model do, and gradients take the same way back. A place is
zero before its array is made; after the last layer that takes it, it may have another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of an array: ``order`` names that of rows, that of tokens, and all others, which
    have ``sides``."""

    order: tuple[int, ...]
    sides: tuple[int, ...]

    @property
    def size(self) -> int:
        """The elements of a token."""
        return math.prod(self.sides)

    def shape(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of an array with these axes."""
        sides = (rows, tokens, *self.sides)
        return tuple(sides[self.order.index(axis)] for axis in range(len(sides)))

    def flat(self, x: mx.array) -> mx.array:
        """Return (rows, T, size) of an array with these axes."""
        x = x.transpose(self.order)
        return x.reshape(*x.shape[:2], -1)

    def whole(self, x: mx.array) -> mx.array:
        """Return the array with these axes of (rows, T, size)."""
        x = x.reshape(*x.shape[:2], *self.sides)
        return x.transpose([self.order.index(axis) for axis in range(x.ndim)])


class CarriedSource(NamedTuple):
    """The origin of what a layer takes: array number ``part`` of the ``output`` of a ``layer``;
    keys (0) or values (1) that one ``added`` to its cache, that ``cache``, or the ``position``
    before; or ``before`` the layers, where the body made it for the argument ``part`` of one."""

    kind: Literal["hidden", "output", "added", "cache", "position", "before"]
    layer: int
    part: int | str = 0

    @property
    def made(self) -> int:
        """The number of the layer that makes the array; -1 for one from before the layers."""
        return -1 if self.kind == "before" else self.layer


HIDDEN = CarriedSource("hidden", -1)
"""The hidden states of the layer before."""


class Shared:
    """A cache of which later layers read, or, without a ``cache``, its place for one whole text."""

    def __init__(self, cache: Any, *added: mx.array) -> None:
        self._cache = cache
        self.is_real = cache is not None
        self.added = self.fetched = added
        self.start = mx.array(self.offset)

    @property
    def offset(self) -> Any:
        """The tokens in the real cache; 0 without one."""
        return getattr(self._cache, "offset", 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        """Add keys and values (rows, heads, T, D) to the real cache, if any; return all."""
        self.added = self.fetched = keys, values
        if self._cache is not None:
            self.fetched = self._cache.update_and_fetch(keys, values)
        return self.fetched

    def keys_and_values(self) -> Sequence[mx.array]:
        """Return the keys and values that the last update returned."""
        return self.fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


Kept = dict[int, Shared]
"""Caches by the layer that adds to them, of a run of generation."""


class Carrier:
    """The arrays that layers pass on: ``takes`` has those that each layer takes by the path of its
    argument, ``outputs`` the structure of what each returns, ``layouts`` the axes of each array.
    ``takes_before`` tells whether a layer takes more than hidden states from before the layers."""

    def __init__(
        self,
        takes: Sequence[Mapping[str, CarriedSource]],
        outputs: Sequence[Any],
        layouts: Mapping[CarriedSource, Layout],
    ) -> None:
        self._takes = takes
        self._outputs = outputs
        self._layouts = layouts
        last: dict[CarriedSource, int] = {}
        for i, sources in enumerate(takes):
            for source in sources.values():
                last |= dict.fromkeys(_arrays(source, i), i)
        self.width = layouts[HIDDEN].size
        self._places = {HIDDEN: 0}
        used: dict[int, tuple[int, int]] = {}
        for source in sorted(last, key=lambda source: source.made):
            size = layouts[source].size
            free = [at for at, (own, end) in used.items() if own == size and end <= source.made]
            place = free[0] if free else self.width
            self.width += 0 if free else size
            self._places[source] = place
            used[place] = size, last[source]
        self._donors = {source.layer for source in last if source.kind == "added"}
        self.takes_before = any(source.kind == "before" for source in last)

    def donors(self, start: int, stop: int) -> list[int]:
        """Return the layers before ``start`` of whose caches a stage needs a copy."""
        taken = [source for i in range(start, stop) for source in self._takes[i].values()]
        found = {source.layer for source in taken if source.kind in ("added", "cache")}
        return sorted(i for i in found if i < start)

    def begin(self, given: Sequence[tuple[Any, Any]]) -> mx.array:
        """Return the first layer's input with all it carries, of the arguments that the body has
        for each layer."""
        args, how = given[0]
        hidden = first_argument(*args, **how)
        states = self._layouts[HIDDEN].flat(hidden)
        arrays = {HIDDEN: hidden}
        for source in self._places:
            if source.kind == "before":
                arrays[source] = dict(tree_flatten(given[source.layer]))[source.part]
        return self._with(mx.zeros((*states.shape[:2], self.width), states.dtype), arrays)

    def states(self, x: mx.array) -> mx.array:
        """Return the hidden states, as layers have them."""
        return self._taken(HIDDEN, x)

    def output(self, i: int, states: mx.array) -> Any:
        """Return what the body may get of layer ``i``: hidden states in the place of each array."""
        return tree_map(lambda _: states, self._outputs[i])

    def keep(self, i: int, given: Any, kept: Kept, x: mx.array) -> None:
        """Add keys and values of layer ``i``, on an earlier stage, to this stage's own cache, which
        is among its arguments in generation."""
        path = next(path for path, each in self._takes[i].items() if each.kind == "cache")
        cache = dict(tree_flatten(given))[path]
        if cache is not None:
            kept[i] = Shared(cache)
            kept[i].update_and_fetch(
                *(self._taken(CarriedSource("added", i, n), x) for n in (0, 1))
            )

    def call(self, i: int, layer: nn.Module, given: Any, kept: Kept, x: mx.array) -> mx.array:
        """Return the output of layer ``i``, of its input: both with all they carry."""
        own: list[Shared] = []
        args, how = tree_map_with_path(partial(self._argument, i, kept, own, x), given)
        leaves = [leaf for _, leaf in tree_flatten(layer(*args, **how))]
        arrays = {HIDDEN: leaves[0]}
        for source in self._places:
            if source.layer == i and source.kind in ("output", "added"):
                parts = leaves if source.kind == "output" else own[0].added
                arrays[source] = parts[int(source.part)]
        if own and own[0].is_real:
            kept[i] = own[0]
        return self._with(x, arrays)

    def _argument(
        self, i: int, kept: Kept, own: list[Shared], x: mx.array, path: str, argument: Any
    ) -> Any:
        """Return what layer ``i`` takes at the path of an argument that the body has for it; its
        cache, if layers take from it, is put into ``own``."""
        source = self._takes[i].get(path)
        if source is None:
            return argument
        if source == CarriedSource("cache", i):
            if i not in self._donors:
                return argument
            own.append(Shared(argument))
            return own[0]
        if source.kind == "position":
            return kept[source.layer].start if source.layer in kept else 0
        if source.kind == "added" and source.layer in kept:
            return kept[source.layer].fetched[int(source.part)]
        if source.kind != "cache":
            return self._taken(source, x)
        if argument is not None:
            return argument
        return Shared(None, *(self._taken(each, x) for each in _arrays(source, i)))

    def _taken(self, source: CarriedSource, x: mx.array) -> mx.array:
        place = self._places[source]
        layout = self._layouts[source]
        # A copy, since a view would hold all that is carried for the gradient.
        return mx.contiguous(layout.whole(x[..., place : place + layout.size]))

    def _with(self, x: mx.array, arrays: Mapping[CarriedSource, mx.array]) -> mx.array:
        """Return ``x`` (rows, T, width) with other arrays in some of the places."""
        parts: list[mx.array] = []
        end = 0
        for source in sorted(arrays, key=lambda source: self._places[source]):
            place = self._places[source]
            layout = self._layouts[source]
            parts += [x[..., end:place], layout.flat(arrays[source])]
            end = place + layout.size
        parts.append(x[..., end:])
        return mx.concatenate([each for each in parts if each.shape[-1]], axis=-1)


class HiddenStates(Carrier):
    """A carrier of hidden states alone, without the work of a general one: in a small model a token
    takes hardly longer than the Python code of its layers."""

    def begin(self, given: Sequence[tuple[Any, Any]]) -> mx.array:
        """Return the first layer's hidden states, of the arguments that the body has for it."""
        args, how = given[0]
        hidden: mx.array = first_argument(*args, **how)
        return hidden

    def states(self, x: mx.array) -> mx.array:
        """Return ``x``, which is hidden states alone."""
        return x

    def output(self, i: int, states: mx.array) -> Any:
        """Return the hidden states: a layer returns nothing else."""
        return states

    def call(self, i: int, layer: nn.Module, given: Any, kept: Kept, x: mx.array) -> mx.array:
        """Return the output of layer ``i`` of ``x``, which takes its first argument's place."""
        args, how = given
        if args:
            out: mx.array = layer(x, *args[1:], **how)
        else:
            out = layer(**{**how, next(iter(how)): x})
        return out


def first_argument(*args: Any, **kwargs: Any) -> Any:
    """Return the first argument of a call, by place or else by name."""
    return args[0] if args else next(iter(kwargs.values()))


def _arrays(source: CarriedSource, i: int) -> list[CarriedSource]:
    """Return the arrays that layer ``i`` takes with a source: a cache has keys and values."""
    if source.kind == "cache" and source.layer < i:
        return [CarriedSource("added", source.layer, n) for n in (0, 1)]
    return [source] if source.kind in ("output", "added", "before") else []
