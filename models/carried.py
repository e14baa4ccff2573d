"""Arrays that Gemma 4's layers take beside hidden states, and how they cross a cut.

Later layers attend to the keys and values of earlier ones, the donors; in small models each layer
has an input of its own, made from the tokens before the first. Between any two layers all of it
stands behind the hidden states, in one array of one width::

    hidden states | keys and values of each donor | inputs of all layers

So stages send one array, as those of any model do, and gradients take the same way back. Keys and
values are zero before their donor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from shardmlx.compat import inputs_of_layers

_MAKERS = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
"""Modules of the body that make the layers' own inputs."""


class _Carried(NamedTuple):
    states: mx.array
    shared: dict[int, tuple[mx.array, mx.array]]
    """Keys and values (rows, groups, T, dim) of each donor."""
    inputs: mx.array | None
    """Inputs of all layers (rows, T, layers, dim)."""


class _Recorded:
    """A KV cache that remembers what was added to it last."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.added: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.added = keys, values
        return self._cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Carrier:
    """The arrays that layers of a ``body`` of mlx-lm's ``gemma4_text`` pass on.

    ``kept`` of a run of generation has, by donor, keys and values of all tokens so far, and the
    position of the first new one.
    """

    def __init__(self, body: nn.Module) -> None:
        self._body = body
        self._sources: list[int] = body.previous_kvs
        borrowed = {source for i, source in enumerate(self._sources) if source != i}
        self.donors = sorted(borrowed)
        heads = [body.layers[i].self_attn for i in self.donors]
        self._heads = [(each.n_kv_heads, each.head_dim) for each in heads]
        self.hidden_size: int = body.config.hidden_size
        self._inputs: int = body.hidden_size_per_layer_input or 0

    @property
    def before(self) -> tuple[str, ...]:
        """Names of the modules that make the layers' own inputs."""
        return _MAKERS if self._inputs else ()

    def stand_in(self, call: Callable[..., mx.array]) -> Callable[..., tuple[mx.array, None, None]]:
        """Return what the body can call for a layer, if only masks and caches matter."""

        def layer(
            x: mx.array, mask: Any, cache: Any, **carried: Any
        ) -> tuple[mx.array, None, None]:
            return call(x, mask, cache), None, None

        return layer

    def simplify(self, body: nn.Module) -> None:
        """Let a copy of the body make no inputs of layers: ``begin`` does."""
        body.hidden_size_per_layer_input = 0

    @property
    def _sizes(self) -> list[int]:
        shared = [2 * groups * dim for groups, dim in self._heads]
        return [self.hidden_size, *shared, len(self._sources) * self._inputs]

    def begin(self, x: mx.array, tokens: mx.array) -> mx.array:
        """Return the first layer's input of embedded ``tokens`` (rows, T), with all it carries."""
        inputs = inputs_of_layers(self._body, x, tokens) if self._inputs else None
        rows, length, _ = x.shape
        shared = {
            i: (mx.zeros((rows, groups, length, dim), x.dtype),) * 2
            for i, (groups, dim) in zip(self.donors, self._heads, strict=True)
        }
        return self._joined(_Carried(x, shared, inputs))

    def states(self, x: mx.array) -> mx.array:
        """Return the hidden states alone."""
        return x[..., : self.hidden_size]

    def keep(self, i: int, x: mx.array, cache: Any, kept: dict[int, Any]) -> None:
        """Add the keys and values of a donor on an earlier stage to this stage's ``cache``."""
        keys, values = self._split(x).shared[i]
        offset = mx.array(cache.offset)
        kept[i] = cache.update_and_fetch(keys, values), offset

    def call(
        self, i: int, layer: nn.Module, mask: Any, cache: Any, kept: dict[int, Any], x: mx.array
    ) -> mx.array:
        """Return the output of layer ``i``, of its input: both with all they carry."""
        carried = self._split(x)
        source = self._sources[i]
        shared, offset = None, None
        if source != i and source in kept:
            shared, offset = kept[source]
        elif source != i:
            shared, offset = tuple(map(mx.contiguous, carried.shared[source])), 0
        given = None if carried.inputs is None else mx.contiguous(carried.inputs[:, :, i])
        recorded = _Recorded(cache) if i in self.donors and cache is not None else cache
        states, found, offset = layer(
            # Copies, since a view would hold all that is carried for the gradient.
            mx.contiguous(carried.states),
            mask,
            recorded,
            per_layer_input=given,
            shared_kv=shared,
            offset=offset,
        )
        if i in self.donors:
            if isinstance(recorded, _Recorded):
                kept[i], found = (found, offset), recorded.added
            carried.shared[i] = found
        return self._joined(carried._replace(states=states))

    def _split(self, x: mx.array) -> _Carried:
        ends = [*accumulate(self._sizes)][:-1]
        states, *parts, inputs = mx.split(x, ends, axis=-1)
        shared = {}
        for i, heads, part in zip(self.donors, self._heads, parts, strict=True):
            keys, values = mx.split(part, 2, axis=-1)
            shared[i] = _by_head(keys, *heads), _by_head(values, *heads)
        by_layer = inputs.reshape(*inputs.shape[:-1], -1, self._inputs) if self._inputs else None
        return _Carried(states, shared, by_layer)

    def _joined(self, carried: _Carried) -> mx.array:
        def parts() -> Iterator[mx.array]:
            yield carried.states
            for i in self.donors:
                for each in carried.shared[i]:
                    yield each.swapaxes(1, 2).flatten(2)
            if carried.inputs is not None:
                yield carried.inputs.flatten(2)

        return mx.concatenate([*parts()], axis=-1)


def _by_head(x: mx.array, groups: int, dim: int) -> mx.array:
    """Return (rows, groups, T, dim) of (rows, T, groups * dim)."""
    return x.reshape(*x.shape[:2], groups, dim).swapaxes(1, 2)


def carrier_of(body: nn.Module) -> Carrier | None:
    """Return what a body's layers pass on; None where that is hidden states alone."""
    return Carrier(body) if type(body).__name__ == "Gemma4TextModel" else None
