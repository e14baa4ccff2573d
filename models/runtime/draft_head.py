"""The head with which some models guess further tokens: a layer after the last (multi-token
prediction, DeepSeek-V3, arXiv:2412.19437).

From hidden states h of the model, and the token that comes after each::

    x(i) = projection(cat(norm(embedding(token i + 1)), norm(h(i))))
    g(i) = final norm(layer(x(0) ... x(i)))         token i + 2 is guessed from lm_head(g(i))

Embedding and lm_head are the model's own, and the layer is of mlx-lm's code of the family: a head
is built as a model of one layer. A guess of more tokens goes on from g, as SGLang's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from shardmlx.models.family import HeadNames
from shardmlx.models.runtime.loaded import derived
from shardmlx.models.runtime.slice import Slice

ONE_LAYER: Mapping[str, Any] = MappingProxyType(
    {"num_hidden_layers": 1, "first_k_dense_replace": 0}
)
"""Fields of config.json for the head: where others have experts, its layer has them too."""


def head_weights(weights: Mapping[str, mx.array], names: HeadNames) -> dict[str, mx.array]:
    """Return the weights of the head out of those of a model, by the names in a model of one layer.
    Copies of the embedding and of the lm_head are left out."""
    own = {}
    ends = {
        names.token_norm: "token_norm",
        names.state_norm: "state_norm",
        names.projection: "projection",
        names.final_norm: "model.norm",
    }
    for name, array in weights.items():
        if name.startswith(("model.embed_tokens.", "lm_head.")):
            own[name] = array
        path, _, leaf = name.removeprefix(names.prefix).rpartition(".")
        if name.startswith(names.prefix) and path not in ("embed_tokens", "shared_head.head"):
            own[f"{ends.get(path, f'model.layers.0.{path}')}.{leaf}"] = array
    return own


class _OneLayer:
    """A model of one layer with the modules of a head, of which ``names`` are the stored names."""

    names: HeadNames

    def __init__(self, args: Any) -> None:
        family: Any = super()
        family.__init__(args)
        width = args.hidden_size
        self.token_norm = nn.RMSNorm(width, args.rms_norm_eps)
        self.state_norm = nn.RMSNorm(width, args.rms_norm_eps)
        self.projection = nn.Linear(2 * width, width, bias=False)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of the head, as the family's code changes them."""
        family: Any = super()
        sanitized: dict[str, mx.array] = family.sanitize(head_weights(weights, self.names))
        return sanitized


def head_class(kind: Any, names: HeadNames) -> Any:
    """Return mlx-lm's class of a family, ``kind``, for the head of a model."""
    return derived(_OneLayer, kind, names=names)


class DraftHead:
    """The head of a model, of which ``model`` is one layer; it guesses once it is ``beside`` the
    last slice."""

    def __init__(self, model: nn.Module, names: HeadNames) -> None:
        self._model = model
        self._names = names
        model.pop("lm_head", None)
        # The family's code gets hidden states, which need no embedding.
        model.model["embed_tokens"] = nn.Identity()

    @property
    def nbytes(self) -> int:
        """The bytes of the head's own arrays, without embedding and lm_head."""
        return sum(array.nbytes for _, array in tree_flatten(self._model.parameters()))

    def beside(self, part: Slice) -> None:
        """Take embedding and lm_head from the last slice, and read what is not in memory yet."""
        self._part = part
        for module in (self._model, part.embedding):
            for _, array in tree_flatten(module.parameters()):
                mx.eval(array)  # one at a time: experts that are stacked exist twice meanwhile

    def new_caches(self, max_kv_size: int | None = None) -> list[Any]:
        """Return an empty cache for each layer of the slice, and at last one for the head."""
        return [*self._part.new_caches(max_kv_size), self._part.new_caches(max_kv_size)[-1]]

    def enter(self, following: mx.array, states: mx.array, cache: Any) -> mx.array:
        """Return the head's states (rows, T, D) for states (rows, T, D) of the slice, after each of
        which comes a token of ``following`` (rows, T). The ``cache`` grows by T."""
        if self._names.after_norm:
            states = self._part.norm(states)
        return self._run(following, states, cache)

    def guess(self, states: mx.array, count: int, cache: Any) -> mx.array:
        """Return the ``count`` tokens that are likeliest to come after the head's states (1, 1, D).
        The ``cache`` grows by one less."""
        guessed: list[mx.array] = []
        for _ in range(count):
            if guessed:
                states = self._run(guessed[-1], states, cache)
            guessed.append(mx.argmax(self._part.logits(states), axis=-1))
        return mx.concatenate(guessed, axis=1)[0].astype(mx.int32)

    def _run(self, following: mx.array, states: mx.array, cache: Any) -> mx.array:
        model = self._model
        pair = [model.token_norm(self._part.embedding(following)), model.state_norm(states)]
        if self._names.states_first:
            pair.reverse()
        out: mx.array = model.model(model.projection(mx.concatenate(pair, -1)), cache=[cache])
        return out
