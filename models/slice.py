"""A stage's part of a decoder, cut out of the lazily built model of mlx-lm.

The whole model is built first, and nothing of it evaluated: names, layer numbers and the initial
LoRA weights are then those of one machine, and what the slice leaves behind was never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from shardmlx.compat import rebind
from shardmlx.models.attention import attend
from shardmlx.models.dropout import key_every_dropout, set_keys
from shardmlx.models.families import FAMILIES, Cached, Given, LayerCall
from shardmlx.models.packed_positions import PackedPositions
from shardmlx.models.recompute import recompute_selectively

EMBEDDING = "model.embed_tokens"

KEPT_TOKENS = 4
"""Number of tokens that a limited KV cache keeps from the beginning, as in mlx-lm."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a parameter: ``module[leaf]``."""

    module: nn.Module
    leaf: str


class Slice:
    """Decoder layers ``start`` to ``stop`` of ``model``, with the embedding if ``start`` is 0, and
    with final norm and lm_head if ``stop`` is the number of layers.

    Parameters go by their global names (``model.layers.12.self_attn.q_proj.lora_a``). With tied
    embeddings the first and the last slice both hold the matrix.
    """

    def __init__(self, model: nn.Module, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.is_first, self.is_last = start == 0, stop == len(model.layers)
        self.tied = "lm_head" not in model
        self._args = model.args
        self._family = FAMILIES[model.model_type]
        self._layers = model.model.layers[start:stop]
        for layer in self._layers:
            rebind(layer.self_attn, "scaled_dot_product_attention", attend)
        self._embedding = model.model.embed_tokens
        self._norm = model.model.norm
        self._head = self._embedding.as_linear if self.tied else model.lm_head
        self._parts: dict[str, nn.Module] = {
            f"model.layers.{start + i}": layer for i, layer in enumerate(self._layers)
        }
        if self.is_first or (self.is_last and self.tied):
            self._parts[EMBEDDING] = self._embedding
        if self.is_last:
            self._parts["model.norm"] = self._norm
            if not self.tied:
                self._parts["lm_head"] = model.lm_head
        self._dropouts = [key_every_dropout(layer) for layer in self._layers]
        self._embedding_dropouts = key_every_dropout(self._embedding)
        self._head_dropouts = (
            self._embedding_dropouts if self.tied else key_every_dropout(model.lm_head)
        )
        self._dtype = self._hidden_dtype(model.layers[0])
        self._empty_caches = make_prompt_cache(model)[start:stop]
        self.chooses_caches = hasattr(model, "make_cache")
        self.trainable: tuple[str, ...] = tuple(
            _backward_order(name for name, _ in self._named("trainable_parameters"))
        )
        self._slots: Mapping[str, Slot] = {
            name: self._find(name) for name, _ in self._named("parameters")
        }

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the trained parameters of the head, of the last slice."""
        prefix = f"{EMBEDDING if self.tied else 'lm_head'}."
        return tuple(name for name in self.trainable if self.is_last and name.startswith(prefix))

    @property
    def hidden_size(self) -> int:
        """D, the width of the hidden states between slices."""
        return int(self._args.hidden_size)

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the hidden states between slices."""
        return self._dtype

    def _hidden_dtype(self, first_layer: nn.Module) -> mx.Dtype:
        """Lazy: nothing is read. Layers may widen what the embedding gives: norms in float32."""
        set_keys(self._embedding_dropouts, 0)
        set_keys(key_every_dropout(first_layer), 0)
        x = self._embedding(mx.zeros((1, 1), mx.int32))
        dtype: mx.Dtype = self._family(self._args, Given(x))(first_layer, x).dtype
        return dtype

    def shares(self, name: str) -> bool:
        """Return whether the first and the last slice, being two, both hold this parameter."""
        return self.tied and not (self.is_first and self.is_last) and name.startswith(EMBEDDING)

    def _named(self, which: str) -> Iterator[tuple[str, mx.array]]:
        for prefix, module in self._parts.items():
            for name, array in tree_flatten(getattr(module, which)()):
                yield f"{prefix}.{name}", array

    def _find(self, name: str) -> Slot:
        prefix = next(p for p in self._parts if name.startswith(p + "."))
        module: Any = self._parts[prefix]
        *path, leaf = name[len(prefix) + 1 :].split(".")
        for step in path:
            module = module[int(step)] if isinstance(module, list) else module[step]
        return Slot(module, leaf)

    def parameters(self) -> dict[str, mx.array]:
        """Return all parameters, frozen and trained, by global name."""
        return {name: self[name] for name in self._slots}

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def __getitem__(self, name: str) -> mx.array:
        slot = self._slots[name]
        array: mx.array = slot.module[slot.leaf]
        return array

    def __setitem__(self, name: str, array: mx.array) -> None:
        slot = self._slots[name]
        slot.module[slot.leaf] = array

    def train(self, mode: bool = True) -> None:
        """Turn dropout on or off."""
        for module in self._parts.values():
            module.train(mode)

    def recompute_selectively(self) -> None:
        """Let norms and activations keep their inputs alone for the backward pass, from now on."""
        for layer in self._layers:
            recompute_selectively(layer)

    @property
    def drops(self) -> bool:
        """True if dropout is on anywhere."""
        dropouts = [*chain(*self._dropouts), *self._embedding_dropouts, *self._head_dropouts]
        return any(dropout.training for dropout in dropouts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters in memory."""
        return sum(array.nbytes for array in self.parameters().values())

    def load(self, advance: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read the slice's tensors, and only those, from disk; ``advance`` is told their bytes."""
        for name in self._slots:
            # One at a time: a tensor that is cast on its way exists twice, the others do not.
            mx.eval(self[name])
            advance(self[name].nbytes)

    def with_parameters(
        self, names: Sequence[str], arrays: Sequence[mx.array], run: Callable[[], mx.array]
    ) -> mx.array:
        """Return ``run()`` with ``arrays`` in the place of the parameters ``names``."""
        before = [self[name] for name in names]
        for name, array in zip(names, arrays, strict=True):
            self[name] = array
        try:
            return run()
        finally:
            for name, array in zip(names, before, strict=True):
                self[name] = array

    def __call__(
        self,
        x: mx.array,
        *,
        key: tuple[int, ...] = (0,),
        first_row: int = 0,
        places: PackedPositions | None = None,
        checkpoint: bool = False,
        attention_chunk: int | None = None,
    ) -> mx.array:
        """Pass a micro-batch through the layers of the slice.

        Token ids (rows, T) on the first slice, hidden states (rows, T, D) on the others, become
        hidden states (rows, T, D).

        ``key`` seeds dropout, of rows from ``first_row`` of the global batch. ``places`` say
        which sequences are in a row that holds several. ``checkpoint`` keeps only the inputs of
        layers for the backward pass and computes the rest again (Chen et al., arXiv:1604.06174).
        ``attention_chunk`` is the most queries whose scores are in memory at a time.
        """
        if self.is_first:
            set_keys(self._embedding_dropouts, *key, -1, first_row=first_row, places=places)
            x = self._embedding(x)
        call = self._family(self._args, Given(x, places=places, chunk=attention_chunk))
        for i in range(len(self._layers)):
            run = partial(self._run_layer, i, call, (*key, self.start + i), first_row, places)
            if checkpoint:
                prefix = f"model.layers.{self.start + i}."
                names = [name for name in self.trainable if name.startswith(prefix)]
                x = self._checkpointed(run, names, x)
            else:
                x = run(x)
        return x

    def norm(self, x: mx.array) -> mx.array:
        """Return the last slice's final norm of hidden states (..., D)."""
        normed: mx.array = self._norm(x)
        return normed

    def logits(
        self,
        x: mx.array,
        *,
        key: tuple[int, ...] = (0,),
        first_row: int = 0,
        places: PackedPositions | None = None,
    ) -> mx.array:
        """Return the last slice's logits (rows, T, V) of normed hidden states (rows, T, D).

        What decides dropout is as for the layers.
        """
        set_keys(self._head_dropouts, *key, self.stop, first_row=first_row, places=places)
        logits: mx.array = self._head(x)
        return logits

    def new_caches(self, max_kv_size: int | None = None) -> list[Any]:
        """Return mlx-lm's empty cache for each layer, for one sequence.

        A family that ``chooses_caches`` by itself passes over ``max_kv_size``, as in mlx-lm.
        """
        if max_kv_size is None or self.chooses_caches:
            return deepcopy(self._empty_caches)
        return [RotatingKVCache(max_kv_size, keep=KEPT_TOKENS) for _ in self._layers]

    def extend(self, x: mx.array, caches: Sequence[Any]) -> mx.array:
        """Pass the next T tokens of each sequence through the layers; ``caches`` grow by T.

        Token ids (rows, T) on the first slice, hidden states (rows, T, D) on the others, become
        hidden states (rows, T, D).
        """
        if self.is_first:
            x = self._embedding(x)
        call = self._family(self._args, Given(x, Cached(self._layers, caches)))
        for layer, cache in zip(self._layers, caches, strict=True):
            x = call(layer, x, cache)
        return x

    def last_logits(self, x: mx.array) -> mx.array:
        """Return logits (rows, V) of the last position of hidden states (rows, T, D)."""
        logits: mx.array = self._head(self._norm(x[:, -1:, :]))
        return logits[:, -1, :]

    def _run_layer(
        self,
        i: int,
        call: LayerCall,
        key: tuple[int, ...],
        first_row: int,
        places: PackedPositions | None,
        x: mx.array,
    ) -> mx.array:
        set_keys(self._dropouts[i], *key, first_row=first_row, places=places)
        return call(self._layers[i], x)

    def _checkpointed(
        self, run: Callable[[mx.array], mx.array], names: Sequence[str], x: mx.array
    ) -> mx.array:
        def inner(x: mx.array, *arrays: mx.array) -> mx.array:
            return self.with_parameters(names, arrays, lambda: run(x))

        out: mx.array = mx.checkpoint(inner)(x, *(self[name] for name in names))
        return out


def _backward_order(names: Iterator[str]) -> list[str]:
    """Names as their gradients come: head and norm, then layers from the last, then embedding."""

    def place(name: str) -> tuple[int, str]:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            return (-int(parts[2]), name)
        return (1, name) if name.startswith(EMBEDDING) else (-1_000_000, name)

    return sorted(names, key=place)
