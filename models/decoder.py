"""Run a range of a decoder's layers through mlx-lm's own code of its family.

How layers are called differs between families: masks and windows, scaled embeddings, soft caps of
logits, factors of queries. All of that is in the ``__call__`` of mlx-lm's model. It runs here, over
steps in the place of the layers::

    embedding   step 0 ... step start ... step stop ...   norm   head
                    |          |              |
                passes on   the slice's    passes on
                            input

What the code computes before ``start`` and after ``stop`` is lazy, and nobody asks for it. A stage
without the embedding gives hidden states in the place of token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from shardmlx.compat import calls, follow_positions, rebind
from shardmlx.errors import UserError
from shardmlx.models.attention import Sight, attend
from shardmlx.models.packed_positions import PackedPositions

ATTENTION, MASK = "scaled_dot_product_attention", "create_attention_mask"

LayerCall = Callable[[mx.array], mx.array]
"""A call of one layer on its input, with all else that the family's code gives it."""

Visit = Callable[[int, LayerCall, mx.array], mx.array]
"""Called for each layer in turn with its number, its call and its input; returns its output."""


class View(NamedTuple):
    """The facts that decide which keys positions of a micro-batch see, beside the family.

    ``places`` say which sequences are in a row that holds several. ``chunk`` is the most queries of
    a piece of attention; None, or all of T, makes no pieces.
    """

    places: PackedPositions | None = None
    chunk: int | None = None


EVERYTHING = View()
"""The view of a row that is one sequence, of all keys at once."""


class Parts(NamedTuple):
    """The parts of mlx-lm's model by path, and the modules that call them."""

    body: nn.Module
    """The module that calls embedding, layers and final norm."""
    top: nn.Module
    """The module that calls the body and the head."""
    body_name: str
    layers_name: str
    embedding_name: str
    layers_path: str
    embedding_path: str
    norms: tuple[str, ...]
    """Paths of what the body has beside them: the final norm."""
    heads: tuple[str, ...]
    """Paths of what the top has beside the body: none where the embedding is the lm_head too."""

    def module(self, path: str) -> nn.Module:
        """Return the module of one of ``norms`` or ``heads``."""
        holder = self.body if path in self.norms else self.top
        found: nn.Module = holder[path.rpartition(".")[2]]
        return found


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model of mlx-lm. Raises ``UserError`` where it is built otherwise."""
    for path, name, module in _lists(model, ""):
        if [*map(id, module[name])] != [*map(id, model.layers)]:
            continue
        embeddings = [key for key, value in module.items() if hasattr(value, "as_linear")]
        top_path, _, body_name = path.rpartition(".")
        if len(embeddings) != 1 or not body_name or not calls(module, MASK):
            break
        top = _at(model, top_path)
        norms = [key for key in _children(module) if key != embeddings[0]]
        heads = [key for key in _children(top) if key != body_name]
        return Parts(
            body=module,
            top=top,
            body_name=body_name,
            layers_name=name,
            embedding_name=embeddings[0],
            layers_path=f"{path}.{name}",
            embedding_path=f"{path}.{embeddings[0]}",
            norms=tuple(f"{path}.{key}" for key in norms),
            heads=tuple(f"{top_path}.{key}".lstrip(".") for key in heads),
        )
    raise UserError(
        f"mlx-lm's model of type {getattr(model, 'model_type', None)!r} cannot be cut into stages: "
        "it is not an embedding, a list of layers and a norm with one mask function"
    )


def _lists(module: nn.Module, path: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the lists of layers that modules without lists around them hold."""
    for name, child in module.items():
        if isinstance(child, list) and child and isinstance(child[0], nn.Module):
            yield path, name, module
        elif isinstance(child, nn.Module):
            yield from _lists(child, f"{path}.{name}".lstrip("."))


def _children(module: nn.Module) -> list[str]:
    return [key for key, child in module.items() if isinstance(child, nn.Module)]


def _at(model: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else ():
        model = model[name]
    return model


class _InPlaceOf:
    """A function that the family's code calls in the place of a module, whose attributes it has."""

    def __init__(self, module: nn.Module, call: Callable[..., mx.array]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Run(NamedTuple):
    """A call of the body, with the input of the first layer and what is done at each."""

    x: mx.array
    visit: Visit | None
    """Function called at each layer; None to pass all layers over."""
    view: View
    outputs: list[mx.array]


class Decoder:
    """Layers ``start`` to ``stop`` of a model of mlx-lm. Not for several threads at a time."""

    def __init__(self, model: nn.Module, start: int, stop: int) -> None:
        self.parts = parts = find_parts(model)
        self._start, self._stop = start, stop
        self.layers: list[nn.Module] = parts.body[parts.layers_name][start:stop]
        for layer in self.layers:
            for module in layer.modules():
                if calls(module, ATTENTION):
                    rebind(module, ATTENTION, attend)
        self.embedding: nn.Module = parts.body[parts.embedding_name]
        self._now: _Run | None = None
        self._from_tokens, self._from_states = self._own_body(), self._own_body()
        # An array of its own, of which only the shape matters: bodies scale it in place.
        self._from_states[parts.embedding_name] = _InPlaceOf(self.embedding, mx.stop_gradient)
        self._top = copy(parts.top)
        self._top[parts.body_name] = _InPlaceOf(parts.body, _first_argument)
        # The kind of each layer's cache, as far as masks differ.
        self._kinds = [
            (type(cache), getattr(cache, "max_size", None)) for cache in make_prompt_cache(model)
        ]

    def _own_body(self) -> nn.Module:
        body = copy(self.parts.body)
        body[self.parts.layers_name] = [
            _InPlaceOf(layer, partial(self._step, i, layer))
            for i, layer in enumerate(self.parts.body[self.parts.layers_name])
        ]
        rebind(body, MASK, self._mask)
        follow_positions(body, self._positions)
        return body

    def run(
        self,
        x: mx.array,
        visit: Visit = lambda i, call, x: call(x),
        *,
        view: View = EVERYTHING,
        caches: Sequence[Any] | None = None,
    ) -> mx.array:
        """Return the hidden states (rows, T, D) after the layers.

        ``x`` are token ids (rows, T) where the first layer is among them, else hidden states (rows,
        T, D). ``visit`` is called for each layer, and ``caches`` are those of these layers.
        """
        run = _Run(x, visit, view, [])
        every = None if caches is None else self._with_stand_ins(caches)
        self._call(self._from_states if self._start else self._from_tokens, run, every)
        return run.outputs[0]

    def norm(self, x: mx.array) -> mx.array:
        """Return the final norm of hidden states (rows, T, D)."""
        return self._call(self._from_states, _Run(x, None, EVERYTHING, []), None)

    def logits(self, x: mx.array) -> mx.array:
        """Return the logits (rows, T, V) of normed hidden states (rows, T, D)."""
        logits: mx.array = self._top(x)
        return logits

    def _call(self, body: nn.Module, run: _Run, caches: Sequence[Any] | None) -> mx.array:
        self._now = run
        try:
            out: mx.array = body(run.x, cache=caches)
            return out
        finally:
            self._now = None

    def _step(self, i: int, layer: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Do what the family's code takes for the call of a layer."""
        if self._now is None:
            raise RuntimeError(f"layer {i} is called outside of a run")
        given, visit, _, outputs = self._now
        if visit is None:
            # Embeddings may be scaled, and nothing else comes before the norm.
            return given
        if not self._start <= i < self._stop:
            return x
        source = given if i == self._start > 0 else x
        outputs[:] = [visit(i, lambda states: layer(states, *args, **kwargs), source)]
        return outputs[0]

    def _mask(
        self, h: mx.array, cache: Any = None, window_size: int | None = None, **how: Any
    ) -> Any:
        """Return the mask that layers take; in pieces and for packed rows one of our own."""
        view = EVERYTHING if self._now is None else self._now.view
        chunk, places = view.chunk, view.places
        if cache is None and not how.get("return_array") and chunk and chunk < h.shape[1]:
            return Sight(chunk, window_size, places)
        if cache is None and places is not None:
            return mx.array(places.mask(window_size))
        return create_attention_mask(h, cache, window_size=window_size, **how)

    def _positions(self) -> mx.array | None:
        """Return the position of each token (T,) in its own sequence; None where a row is one."""
        places = None if self._now is None else self._now.view.places
        return None if places is None else mx.array(places.positions)

    def _with_stand_ins(self, caches: Sequence[Any]) -> list[Any]:
        """Return a cache for every layer: the family's code asks that of one layer of a kind for
        the mask of all of them."""
        own = dict(zip(self._kinds[self._start : self._stop], caches, strict=True))
        every = [own.get(kind, caches[0]) for kind in self._kinds]
        every[self._start : self._stop] = caches
        return every


def _first_argument(*args: Any, **kwargs: Any) -> Any:
    """Return what is given in the place of token ids."""
    return args[0] if args else kwargs["inputs"]
