"""Find the parts of a model of mlx-lm, and check that stages can run its layers apart.

A model can be cut if each layer is called once, in order, and takes from the layers before it only
arrays that they returned, or keys and values that they added to their caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from shardmlx.errors import UserError
from shardmlx.models.families import ANOTHER
from shardmlx.models.runtime.carried import Carrier
from shardmlx.models.runtime.stand_ins import (
    CannotBeCutError,
    InPlaceOf,
    at,
    embeddings,
    examine,
    width_of,
    with_part,
    with_weights,
    without_adapters,
)


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
    """Number of each layer's cache among mlx-lm's; None for a layer without one of its own."""
    carrier: Carrier
    """The arrays that layers pass on: hidden states, and what else they take."""

    @property
    def layers(self) -> list[nn.Module]:
        """The modules of the layers, in order."""
        layers: list[nn.Module] = at(self.body, self.layers_name)
        return layers

    @property
    def embedding(self) -> nn.Module:
        """The module of the embedding, quantised or not."""
        embedding: nn.Module = self.body[self.embedding_name]
        return embedding

    @property
    def vocabulary(self) -> int:
        """The rows of the embedding."""
        return int(without_adapters(self.embedding).weight.shape[0])

    @property
    def width(self) -> int:
        """The size of an embedded token."""
        return width_of(self.embedding)

    @property
    def ends(self) -> Mapping[str, nn.Module]:
        """Modules by path outside of the layers, but the embedding."""
        return {**self.before, **self.norms, **self.heads}


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model of mlx-lm. Raises ``UserError`` if it cannot be cut."""
    try:
        return _find(model)
    except CannotBeCutError as error:
        kind = getattr(model, "model_type", None)
        raise UserError(
            f"mlx-lm's model of type {kind!r} cannot be cut into stages: {error}",
            f"run it with mlx-lm on one machine, or {ANOTHER}",
        ) from None


def _find(model: nn.Module) -> Parts:
    list_path = _path_of_layers(model)
    body_path = list_path
    while not embeddings(at(model, body_path)):
        body_path, dot, _ = body_path.rpartition(".")
        if not dot:
            raise CannotBeCutError("no module around its layers has an embedding")
    top_path, _, body_name = body_path.rpartition(".")
    body = at(model, body_path)
    top = at(model, top_path)
    layers_name = list_path[len(body_path) + 1 :]
    own_values = [*body.items(), *top.items()]
    if any(isinstance(value, mx.array) for key, value in own_values if key[0] != "_"):
        raise CannotBeCutError("it has numbers of its own beside those of its modules")
    caches = make_prompt_cache(model)
    found, carrier = examine(body, layers_name, caches)
    own = f"{body_path}."
    above = f"{top_path}.".lstrip(".")
    named = with_weights(body, layers_name)
    others = [
        name
        for name in named
        if name not in (found.embedding, *found.before) and ("." not in name or name in found.after)
    ]
    heads = {own + name: named[name] for name in others if name in found.heads}
    if not found.heads:
        heads = {above + name: top[name] for name in _heads_of(top, body_name)}
    return Parts(
        body=body,
        top=top,
        body_name=body_name,
        layers_name=layers_name,
        embedding_name=found.embedding,
        layers_path=list_path,
        embedding_path=own + found.embedding,
        before={own + name: named[name] for name in found.before},
        norms={own + name: named[name] for name in others if name not in found.heads},
        heads=heads,
        body_has_head=bool(found.heads),
        caches=tuple(found.caches),
        carrier=carrier,
    )


def _heads_of(top: nn.Module, body_name: str) -> list[str]:
    """Return the names of the heads that the code of ``top`` calls: a spare one may stand beside
    the embedding."""
    called: list[str] = []
    states = mx.zeros((1, 1, width_of(top[body_name][embeddings(top[body_name])[0]])))
    own = with_part(top, body_name, InPlaceOf(top[body_name], lambda *args, **kwargs: states))
    for name in with_weights(top, body_name):
        if "." not in name:
            own[name] = InPlaceOf(top[name], partial(_call_head, called, name, top[name]))
    own(mx.zeros((1, 1), mx.int32))
    return called


def _call_head(called: list[str], name: str, head: nn.Module, x: mx.array) -> mx.array:
    called.append(name)
    training = head.training
    head.eval()  # dropout has no key yet
    out: mx.array = head(x)
    head.train(training)
    return out


def _path_of_layers(model: nn.Module) -> str:
    layers = [*map(id, getattr(model, "layers", None) or ())]
    for path, module in model.named_modules():
        for name, child in module.items() if layers and path else ():
            if isinstance(child, list) and [*map(id, child)] == layers:
                return f"{path}.{name}"
    raise CannotBeCutError("its layers are not one list")
