"""Run a range of a decoder's layers through mlx-lm's own code of its family.

Families call layers differently: masks and windows, scaled embeddings, soft caps of logits, factors
of queries. All of that is in the ``__call__`` of mlx-lm's model, which runs here over steps in
place of the layers::

    embedding   step 0 ... step start ... step stop ...   norm   head
                    |          |              |
                passes on   the slice's    passes on
                            input

Results before ``start`` and after ``stop`` are lazy, and never evaluated. In a stage without the
embedding every step before its first layer returns that layer's input. ``models.runtime.parts``
checks that a model can run in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from copy import copy, deepcopy
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from shardmlx.compat import calls, follow_positions, rebind
from shardmlx.models.runtime.attention import ChunkedMask, attend
from shardmlx.models.runtime.carried import Kept, first_argument
from shardmlx.models.runtime.packed_positions import PackedPositions
from shardmlx.models.runtime.parts import Parts
from shardmlx.models.runtime.recurrence import use_pieces
from shardmlx.models.runtime.ropes import ropes_of, rotating
from shardmlx.models.runtime.stand_ins import InPlaceOf, at, with_layers
from shardmlx.models.runtime.traced_positions import Places

ATTENTION, MASK = "scaled_dot_product_attention", "create_attention_mask"

POSITIONED = (KVCache, RotatingKVCache)
"""Caches whose position and window alone matter outside their layer."""

LayerCall = Callable[[mx.array], mx.array]
"""A call of one layer on its input, with the other arguments of the family's code."""

Visit = Callable[[int, LayerCall, mx.array], mx.array]
"""Called for each layer with its number, its call and its input; returns its output."""


class _Run(NamedTuple):
    x: mx.array
    visit: Visit | None
    outputs: list[mx.array]
    kept: Kept
    places: Places | None = None
    chunk: int | None = None
    given: list[tuple[Any, Any]] | None = None
    """The arguments of each layer, of a run that only asks for these."""
    is_normed: bool = False
    """True if ``x`` has passed the final norm, so that a head is to follow."""


class _AllGiven(Exception):
    """The body has come to the layers, and is not needed any more."""


def _attentions(layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of layers that call MLX's attention."""
    for layer in layers:
        yield from (module for module in layer.modules() if calls(module, ATTENTION))


class Decoder:
    """Layers ``start`` to ``stop`` of a model of mlx-lm, on a device that ``fuses`` attention or
    not. Not for several threads at a time."""

    def __init__(
        self, model: nn.Module, start: int, stop: int, parts: Parts, *, fuses: bool = False
    ) -> None:
        self.parts = parts
        self._start = start
        self._stop = stop
        self.layers: list[nn.Module] = parts.layers[start:stop]
        for layer in self.layers:
            for module in layer.modules():
                if calls(module, ATTENTION):
                    rebind(module, ATTENTION, attend)
            use_pieces(layer)
        self._ropes = [*chain(*map(ropes_of, _attentions(self.layers)))]
        self.embedding = parts.embedding
        self._carrier = parts.carrier
        self._fuses = fuses
        self._now: _Run | None = None
        self._from_tokens = self._own_body(self.embedding)
        # A new array of which only the shape matters: bodies scale it in place.
        width = parts.width
        self._from_states = self._own_body(lambda ids: mx.stop_gradient(self._given[..., :width]))
        self._top = copy(parts.top)
        self._top[parts.body_name] = InPlaceOf(parts.body, self._head)
        self._empty = make_prompt_cache(model)
        self._kinds = [*map(_kind, self._empty)]
        self._donors = self._carrier.donors(start, stop)
        # Numbers of the caches of these layers, and of earlier donors, among those of mlx-lm.
        numbers = (parts.caches[i] for i in [*self._donors, *range(start, stop)])
        self.caches = [i for i in numbers if i is not None]
        self._has_every_cache = self.caches == [*range(len(self._empty))]
        places = [hasattr(cache, "offset") for cache in self._empty]
        self._counts = any(places) and not any(places[i] for i in self.caches)

    def takes_shared_prefixes(self) -> bool:
        """Return whether rows of the whole model may share prefixes: without a module for it,
        attention may rotate by the place in the row."""
        return all(map(ropes_of, _attentions(self.parts.layers)))

    def _own_body(self, embed: Callable[[mx.array], mx.array]) -> nn.Module:
        parts = self.parts
        body = with_layers(parts.body, parts.layers_name, self._step)
        if parts.body_has_head:
            # The head is called separately, after the norm.
            for name in parts.heads:
                leaf = name.rpartition(".")[2]
                body[leaf] = InPlaceOf(body[leaf], self._project)
        body[parts.embedding_name] = InPlaceOf(self.embedding, embed, as_linear=self._project)
        for holder in (body, at(body, parts.layers_name.rpartition(".")[0])):
            for method in ("__call__", "_make_masks"):
                if calls(holder, MASK, method):
                    rebind(holder, MASK, self._mask, method)
        follow_positions(body, self._positions)
        return body

    def _head(self, *args: Any, **kwargs: Any) -> mx.array:
        """Return the output of the body, as far as the family's code sees it."""
        if not self.parts.body_has_head:
            return self._given
        out: mx.array = self._from_states(mx.zeros(self._given.shape[:-1], mx.int32), cache=None)
        return out

    def _project(self, x: mx.array) -> mx.array:
        """Stand in for a head that the body calls: norm and head are called separately."""
        assert self._now is not None, "called within a run"
        if self._now.visit is None:
            self._now.outputs[:] = [x]
        if not self._now.is_normed:
            return x
        head: Any = next(iter(self.parts.heads.values()), self.embedding.as_linear)
        out: mx.array = head(self._given)
        return out

    @property
    def _given(self) -> mx.array:
        assert self._now is not None, "called within a run"
        return self._now.x

    def run(
        self,
        x: mx.array,
        visit: Visit = lambda i, call, x: call(x),
        *,
        places: Places | None = None,
        chunk: int | None = None,
        caches: Sequence[Any] | None = None,
    ) -> mx.array:
        """Return the hidden states (rows, T, D) after the layers.

        ``x`` are token ids (rows, T) for the first layer, else hidden states (rows, T, D).
        ``caches`` are those of these layers, ``places`` the sequences of a packed row. ``chunk`` is
        the most queries of a piece of attention; None, or all of T, makes no pieces.
        """
        run = _Run(x, visit, [], {}, places, chunk)
        every = None if caches is None else self._with_stand_ins(caches)
        if self._start == 0:
            given: list[tuple[Any, Any]] = []
            with suppress(_AllGiven):
                self._call(self._from_tokens, _Run(x, None, [], {}, given=given), every)
            run = run._replace(x=self._carrier.begin(given))
        shared = _with_shared_prefixes(places)
        with nullcontext() if shared is None else rotating(self._ropes, mx.array(shared.positions)):
            self._call(self._from_states, run, every)
        if caches is not None and self._counts:
            count = mx.zeros((x.shape[0], 1, x.shape[1], 1), mx.int8)
            caches[-1].update_and_fetch(count, count)
        return run.outputs[0]

    def step(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the logits (rows, 1, V) after tokens (rows, 1), of layers that are the whole
        model: by mlx-lm's own code as it is, which makes no stops."""
        logits: mx.array = self.parts.top(tokens, cache=self._with_stand_ins(caches))
        return logits

    def new_caches(self) -> list[Any]:
        """Return an empty cache for each layer that has one, and one that counts tokens if none of
        these does: in some families layers take positions of the caches of others."""
        own = [deepcopy(self._empty[i]) for i in self.caches]
        return [*own, RotatingKVCache(1)] if self._counts else own

    def norm(self, x: mx.array) -> mx.array:
        """Return the final norm of hidden states (rows, T, D)."""
        run = _Run(x, None, [], {})
        out = self._call(self._from_states, run, None)
        return run.outputs[0] if self.parts.body_has_head else out

    def logits(self, x: mx.array) -> mx.array:
        """Return the logits (rows, T, V) of normed hidden states (rows, T, D)."""
        return self._call(self._top, _Run(x, None, [], {}, is_normed=True), None)

    def _call(self, body: nn.Module, run: _Run, caches: Sequence[Any] | None) -> mx.array:
        self._now = run
        # Hidden states come with tokens too, since some code looks at their shape.
        is_tokens = mx.issubdtype(run.x.dtype, mx.integer)
        tokens = run.x if is_tokens else mx.zeros(run.x.shape[:-1], mx.int32)
        out: mx.array
        try:
            out = body(tokens, cache=caches)
            return out
        finally:
            self._now = None

    def _step(self, i: int, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the call of a layer."""
        if self._now is None:
            raise RuntimeError(f"layer {i} is called outside of a run")
        run = self._now
        carrier = self._carrier
        outputs = self._now.outputs
        if run.given is not None:
            run.given.append((args, kwargs))
            if not carrier.takes_before:
                raise _AllGiven
            # Another array, since bodies change what they get in place.
            return carrier.output(i, mx.stop_gradient(first_argument(*args, **kwargs)))
        x = outputs[0] if outputs else run.x
        if run.is_normed:
            x = mx.zeros((*x.shape[:2], carrier.width), x.dtype)
        if run.visit is not None and i in self._donors:
            carrier.keep(i, (args, kwargs), run.kept, x)
        if run.visit is not None and self._start <= i < self._stop:
            layer = self.layers[i - self._start]
            call = partial(carrier.call, i, layer, (args, kwargs), run.kept)
            x = run.visit(i, call, x)
            outputs[:] = [x]
        # Without a visit, embeddings may be scaled; nothing else comes before the norm.
        return carrier.output(i, carrier.states(x))

    def _mask(
        self, h: mx.array, cache: Any = None, window_size: int | None = None, **how: Any
    ) -> Any:
        """Return the mask for layers; our own for attention in pieces and packed rows."""
        places, chunk = (None, None) if self._now is None else (self._now.places, self._now.chunk)
        shared = _with_shared_prefixes(places)
        if cache is None and shared is not None:
            whole, *taken = shared.whole()
            sources, own = map(mx.array, taken)
            return ChunkedMask(chunk or len(sources), window_size, whole, taken=(sources, own))
        if cache is None and not how.get("return_array") and chunk and chunk < h.shape[1]:
            return ChunkedMask(chunk, window_size, places, self._fuses)
        if cache is None and places is not None:
            return mx.array(places.mask(window_size))
        if isinstance(cache, RotatingKVCache) and cache.keep:
            if window_size is not None:
                raise ValueError("sliding windows do not go with a cache that keeps first tokens")
            count = h.shape[1]
            if count > 1 and cache.offset + count > cache.max_size:
                return _mask_of_limited(cache, count)
        return create_attention_mask(h, cache, window_size=window_size, **how)

    def _positions(self) -> mx.array | None:
        """Return the position of each token (T,) in its own sequence; None if a row is one."""
        places = None if self._now is None else self._now.places
        return None if places is None else mx.array(places.positions)

    def _with_stand_ins(self, caches: Sequence[Any]) -> list[Any]:
        """Return every cache that the family's code uses: one mask serves all layers of a kind."""
        if self._has_every_cache:
            return [*caches[: len(self._empty)]]
        own = {self._kinds[i]: cache for i, cache in zip(self.caches, caches, strict=False)}
        # Layers of other kinds are outside; ours may take positions from their caches.
        placed = next((cache for cache in caches if hasattr(cache, "offset")), None)
        every = [
            own.get(kind, placed if placed is not None and kind[0] in POSITIONED else empty)
            for kind, empty in zip(self._kinds, self._empty, strict=True)
        ]
        for i, cache in zip(self.caches, caches, strict=False):
            every[i] = cache
        return every


def _with_shared_prefixes(places: Places | None) -> PackedPositions | None:
    """Return the places if a sequence has its beginning in another."""
    if isinstance(places, PackedPositions) and places.shares_prefixes:
        return places
    return None


def _mask_of_limited(cache: RotatingKVCache, count: int) -> mx.array:
    """Return which of the tokens held each of ``count`` new ones sees, for a cache that keeps the
    first tokens of a text and the last ones: those that it would see if it came alone. mlx-lm's own
    mask hides the first tokens from most of a chunk, so that a text depends on its chunks."""
    before = min(cache.offset, cache.max_size - 1)
    held = mx.arange(before + count)
    new = held[before:, None]
    is_near = held > new - (cache.max_size - cache.keep)
    seen: mx.array = (held <= new) & (is_near | (held < cache.keep))
    return seen


def _kind(cache: Any) -> tuple[Any, ...]:
    """Return the properties of a cache that masks depend on, and of those in it."""
    inner = map(_kind, getattr(cache, "caches", ()))
    return type(cache), getattr(cache, "max_size", None), *inner
