"""A stage's part of a decoder, cut out of the lazily built model of mlx-lm.

The whole model is built first, and not evaluated: names, layer numbers and initial LoRA weights are
then the same as on one machine, and the rest of the model is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache

from shardmlx.compat import gpu_fuses_attention
from shardmlx.models.runtime.activations import recompute_selectively, swiglu, use_swiglu
from shardmlx.models.runtime.decoder import Decoder, LayerCall, Visit
from shardmlx.models.runtime.dropout import KeyedDropout, key_every_dropout, set_keys, starts_of
from shardmlx.models.runtime.parts import Parts, find_parts
from shardmlx.models.runtime.recurrence import use_chunks
from shardmlx.models.runtime.stand_ins import at
from shardmlx.models.runtime.traced_positions import Places

Sum = Callable[[mx.array], mx.array]
"""A lazy sum over the ranks of a group."""


class Piece(NamedTuple):
    """Half-open ``ranges`` of an array with ``whole`` rows, columns or the like along ``axis``."""

    ranges: tuple[tuple[int, int], ...]
    whole: int
    axis: int

    def of(self, array: mx.array) -> mx.array:
        """Return the piece of a whole array, in a row: MLX would copy quantised weights, and those
        of experts, each time that it multiplies by them."""
        parts = [mx.take(array, mx.arange(*each), axis=self.axis) for each in self.ranges]
        return mx.contiguous(mx.concatenate(parts, axis=self.axis))

    @property
    def size(self) -> int:
        """The number of rows or columns in the ranges."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def everything(self) -> Piece:
        """The same axis with all its rows or columns."""
        return self._replace(ranges=((0, self.whole),))

    def common(self, other: Piece) -> list[tuple[slice, slice]]:
        """Return what both have along the same axis: where in this piece, and in the other."""
        found = []
        at = 0
        for start, stop in self.ranges:
            to = 0
            for first, last in other.ranges:
                low = max(start, first)
                high = min(stop, last)
                if low < high:
                    size = high - low
                    here = at + low - start
                    there = to + low - first
                    found.append((slice(here, here + size), slice(there, there + size)))
                to += last - first
            at += stop - start
        return found

    def meets(self, other: Piece) -> bool:
        """Return whether both have an element of the array: along different axes they always do."""
        return other.axis != self.axis or bool(self.common(other))

    def put(self, piece: mx.array, other: Piece, target: mx.array | None = None) -> mx.array:
        """Return ``target``, an ``other`` piece of the same array, zeros at first, with what both
        have of it."""
        if other.axis != self.axis:  # columns of experts, and whole ones
            part = other.of(self.put(piece, self.everything))
            return part if target is None else target + part
        before = (slice(None),) * self.axis
        if target is None:
            sides = (*piece.shape[: self.axis], other.size, *piece.shape[self.axis + 1 :])
            target = mx.zeros(sides, piece.dtype)
        for here, there in self.common(other):
            target[(*before, there)] = piece[(*before, here)]
        return target


class Slice:
    """Decoder layers ``start`` to ``stop`` of ``model``, with the embedding if ``start`` is 0, and
    with final norm and lm_head if ``stop`` is the number of layers.

    Parameters go by their global names (``model.layers.12.self_attn.q_proj.lora_a``). With tied
    embeddings the first and the last slice both hold the matrix. Slices of one model may share its
    ``parts``, which take long to find. ``hidden_size`` and ``dtype`` are those of hidden states,
    with what they carry; ``output_size`` is that of what the stage gives, normed on the last.
    """

    def __init__(self, model: nn.Module, start: int, stop: int, parts: Parts | None = None) -> None:
        parts = parts or find_parts(model)
        self.start = start
        self.stop = stop
        self.is_first = start == 0
        self.is_last = stop == len(model.layers)
        self.tied = not parts.heads
        fuses = mx.default_device() == mx.gpu and gpu_fuses_attention()
        self._decoder = decoder = Decoder(model, start, stop, parts, fuses=fuses)
        embedding = {parts.embedding_path: parts.embedding}
        head = parts.heads or embedding
        firsts = {**embedding, **parts.before} if self.is_first else {}
        lasts = {**(embedding if self.tied else {}), **parts.norms, **parts.heads}
        layers = [
            {f"{parts.layers_path}.{i}": layer} for i, layer in enumerate(decoder.layers, start)
        ]
        lasts = lasts if self.is_last else {}
        self._groups = [firsts, *layers, lasts]
        self._parts = {name: e for group in (*layers, firsts, lasts) for name, e in group.items()}
        self._layer_prefix = f"{parts.layers_path}."
        self._embedding_prefix = f"{parts.embedding_path}."
        self._head_prefixes = tuple(f"{path}." for path in head)
        # Each has the number of its layer in keys: -1 is the embedding, ``stop`` the head.
        self._dropouts: dict[int, list[KeyedDropout]] = {
            -1: key_every_dropout(parts.embedding),
            **{i: key_every_dropout(layer) for i, layer in enumerate(decoder.layers, start)},
            stop: [*chain(*map(key_every_dropout, head.values()))],
        }
        states = self._first_states(model)
        self.takes_shared_prefixes = decoder.takes_shared_prefixes()
        self.dtype: mx.Dtype = states.dtype
        self.hidden_size: int = states.shape[-1]
        self.output_size = parts.width if self.is_last else self.hidden_size
        self.share = ""
        """The share that the slice has of its layers, in the names of its caches."""
        self.pieces: dict[str, Piece] = {}
        """The places of parameters in whole ones, where others of a group have the rest."""
        self.partial: tuple[str, ...] = ()
        """Trained parameters that are whole, in parts of the layers that are not: ``all_sum`` of
        the group makes their gradients whole."""
        self.all_sum: Sum | None = None
        self.chooses_caches = hasattr(model, "make_cache")
        # The module and the name in it of each parameter.
        self._slots: Mapping[str, tuple[nn.Module, str]] = {
            name: self._find(name) for name in self._named("parameters")
        }
        self.trainable = tuple(
            sorted(self._named("trainable_parameters"), key=self._backward_place)
        )
        self.stored: dict[str, mx.array] = {}
        """Values of trained parameters in the files, if these are more exact."""

    @property
    def embedding(self) -> nn.Module:
        """The embedding, of which slices but the first read nothing, unless they are tied."""
        return self._decoder.embedding

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the trained parameters of the head, of the last slice."""
        prefixes = self._head_prefixes if self.is_last else ()
        return tuple(name for name in self.trainable if name.startswith(prefixes))

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of parameters by use: before the layers, in each, after (a tied one twice)."""
        prefixes = [tuple(f"{path}." for path in group) for group in self._groups]
        return [tuple(name for name in self._slots if name.startswith(each)) for each in prefixes]

    def name_of(self, group: int) -> str:
        """Return the name of a group of weights: the embedding, a layer, or the lm_head."""
        if group == 0:
            return "the embedding"
        return f"layer {self.start + group - 1}" if group <= self.stop - self.start else "lm_head"

    def _first_states(self, model: nn.Module) -> mx.array:
        """Return the first layer's lazy hidden states (1, 1, D), perhaps wider than embeddings."""
        first = Decoder(model, 0, 1, self._decoder.parts)
        set_keys(self._dropouts[-1], 0)
        set_keys(key_every_dropout(first.layers[0]), 0)
        return first.run(mx.zeros((1, 1), mx.int32))

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The slice's layers by their number in the model."""
        return dict(enumerate(self._decoder.layers, self.start))

    def names_in(self, layer: int, path: str) -> list[str]:
        """Return the names of the parameters of a module, or of an array, of a layer."""
        whole = f"{self._layer_prefix}{layer}.{path}"
        return [name for name in self._slots if name == whole or name.startswith(f"{whole}.")]

    def shares(self, name: str) -> bool:
        """Return whether the first and the last of several slices both hold this parameter."""
        is_one = self.is_first and self.is_last
        return self.tied and not is_one and name.startswith(self._embedding_prefix)

    def _named(self, which: str) -> Iterator[str]:
        for prefix, module in self._parts.items():
            for name, _ in tree_flatten(getattr(module, which)()):
                yield f"{prefix}.{name}"

    def _find(self, name: str) -> tuple[nn.Module, str]:
        prefix = next(p for p in self._parts if name.startswith(p + "."))
        path, _, leaf = name[len(prefix) + 1 :].rpartition(".")
        return at(self._parts[prefix], path), leaf

    def parameters(self) -> dict[str, mx.array]:
        """Return all arrays of the slice by their names in the model."""
        return {name: self[name] for name in self._slots}

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def __getitem__(self, name: str) -> mx.array:
        module, leaf = self._slots[name]
        array: mx.array = module[leaf]
        return array

    def __setitem__(self, name: str, array: mx.array) -> None:
        module, leaf = self._slots[name]
        module[leaf] = array

    @property
    def training(self) -> bool:
        """True unless ``train(False)`` was the last call."""
        return any(module.training for module in self._parts.values())

    def train(self, mode: bool = True) -> None:
        """Turn dropout on or off in all modules of the slice."""
        for module in self._parts.values():
            module.train(mode)

    def prepare_training(self, *, is_selective: bool) -> None:
        """Compute recurrent layers in chunks of tokens from now on, and SwiGLU faster where MLX is
        slow at it, or make norms and activations keep only their inputs for the backward pass."""
        for layer in self._decoder.layers:
            use_chunks(layer)
            if is_selective:
                recompute_selectively(layer)
            else:
                use_swiglu(layer, swiglu)

    @property
    def head_drops(self) -> bool:
        """True if a dropout of the last slice's head is active."""
        return any(dropout.training for dropout in self._dropouts[self.stop])

    def dropout_starts(self, key: tuple[int, ...], first_row: int = 0) -> mx.array:
        """Return the numbers from which all dropouts of the slice draw, uint32 (dropouts, 2): a
        ``key`` of calls, which may be an input of a graph that is compiled."""
        starts = [
            starts_of(len(dropouts), *key, number, first_row=first_row)
            for number, dropouts in self._dropouts.items()
        ]
        return mx.array(np.concatenate(starts))

    def _set_starts(
        self, number: int, key: tuple[int, ...] | mx.array, first_row: int, **places: Any
    ) -> None:
        """Give the dropouts of a layer, by its number in keys, what they draw from."""
        dropouts = self._dropouts[number]
        if not dropouts:
            return
        if isinstance(key, mx.array):
            numbers = [each for each in self._dropouts if each < number]
            begin = sum(len(self._dropouts[each]) for each in numbers)
            starts = key[begin : begin + len(dropouts)]
        else:
            starts = mx.array(starts_of(len(dropouts), *key, number, first_row=first_row))
        for i, dropout in enumerate(dropouts):
            dropout.set_starts(starts[i], **places)

    @property
    def nbytes(self) -> int:
        """The bytes of these arrays."""
        return sum(array.nbytes for array in self.parameters().values())

    def load(self) -> None:
        """Read the slice's tensors, and only those, from disk."""
        for name in self._slots:
            # One at a time: a tensor that is cast exists twice meanwhile.
            mx.eval(self[name])

    def share_frozen(self, other: Slice) -> None:
        """Take the parameters that are not trained from a slice of the same layers, which may lack
        some of the adapters."""
        for name in self._slots.keys() - set(self.trainable):
            self[name] = other[name if name in other else _without_adapter(name)]

    def with_parameters(
        self, names: Sequence[str], arrays: Sequence[mx.array], run: Callable[[], mx.array]
    ) -> mx.array:
        """Return ``run()`` with ``arrays`` in the place of the parameters ``names``."""
        with self.holding(dict(zip(names, arrays, strict=True))):
            return run()

    @contextmanager
    def holding(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """Have ``weights`` in the place of the parameters of these names in a block: graphs that it
        builds read them."""
        before = {name: self[name] for name in weights}
        for name, array in weights.items():
            self[name] = array
        try:
            yield
        finally:
            for name, array in before.items():
                self[name] = array

    def __call__(
        self,
        x: mx.array,
        *,
        key: tuple[int, ...] | mx.array = (0,),
        first_row: int = 0,
        places: Places | None = None,
        checkpoint: bool = False,
        attention_chunk: int | None = None,
        visit: Visit | None = None,
    ) -> mx.array:
        """Return hidden states (rows, T, D) after the layers, of token ids (rows, T) on the first
        slice, or of hidden states on the others.

        ``key`` seeds dropout, of rows from ``first_row`` of the global batch, or it is what
        ``dropout_starts`` returned of these. ``places`` are the
        sequences of a packed row. ``checkpoint`` keeps only the inputs of layers for the backward
        pass and recomputes the rest (Chen et al., arXiv:1604.06174). ``attention_chunk`` is the
        most queries whose scores are in memory at a time. ``visit`` replaces the call of each
        layer.
        """
        if self.is_first:
            self._set_starts(-1, key, first_row, places=places)

        def step(i: int, call: LayerCall, x: mx.array) -> mx.array:
            self._set_starts(i, key, first_row, places=places)
            if checkpoint:
                call = partial(self._checkpointed, i, call)
            return call(x) if visit is None else visit(i, call, x)

        return self._decoder.run(x, step, places=places, chunk=attention_chunk)

    def embed(self, tokens: mx.array, **how: Any) -> mx.array:
        """Return the hidden states (rows, T, D) before the first layer, of token ids (rows, T)."""
        return self(tokens, visit=lambda i, call, x: x, **how)

    def norm(self, x: mx.array) -> mx.array:
        """Return the final norm of hidden states (rows, T, D). Only the last slice has it."""
        return self._decoder.norm(x)

    def logits(
        self,
        x: mx.array,
        *,
        key: tuple[int, ...] | mx.array = (0,),
        first_row: int = 0,
        places: Places | None = None,
    ) -> mx.array:
        """Return the last slice's logits (rows, T, V) of normed hidden states (rows, T, D)."""
        self._set_starts(self.stop, key, first_row, places=places)
        return self._decoder.logits(x)

    def new_caches(self, max_kv_size: int | None = None) -> list[Any]:
        """Return an empty cache a layer for one sequence, limited unless a family chooses."""
        if max_kv_size is None or self.chooses_caches:
            return self._decoder.new_caches()
        # mlx-lm keeps the first four tokens too.
        return [RotatingKVCache(max_kv_size, keep=4) for _ in self._decoder.caches]

    @property
    def cache_names(self) -> tuple[str, ...]:
        """Names of ``new_caches``, the same for a layer in whichever slice it is."""
        names = [f"{i}{self.share}" for i in self._decoder.caches]
        return (*names, "count") if len(names) < len(self._decoder.new_caches()) else (*names,)

    def extend(self, x: mx.array, caches: Sequence[Any]) -> mx.array:
        """Do the same with the next T tokens of each sequence; ``caches`` grow by T."""
        return self._decoder.run(x, caches=caches)

    def step(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the logits (rows, V) after the next token of each sequence (rows, 1), of a slice
        that is the whole model, without shares; ``caches`` grow by one."""
        return self._decoder.step(tokens, caches).flatten(0, 1)

    def try_step(self, caches: Sequence[Any]) -> None:
        """Extend the slice by a token, lazily, to see whether its code takes the ``caches``: they
        grow, and nothing is computed. Raises what the code raises."""
        ids = (1, 1)
        states = (1, 1, self.hidden_size)
        x = mx.zeros(ids, mx.int32) if self.is_first else mx.zeros(states, self.dtype)
        self.extend(x, caches)

    def last_logits(self, x: mx.array, count: int = 1) -> mx.array:
        """Return logits (rows * count, V) of the last positions of hidden states (rows, T, D)."""
        return self._decoder.logits(self._decoder.norm(x[:, -count:, :])).flatten(0, 1)

    def _checkpointed(self, i: int, call: LayerCall, x: mx.array) -> mx.array:
        prefix = f"{self._layer_prefix}{i}."
        names = [name for name in self.trainable if name.startswith(prefix)]

        def inner(x: mx.array, *arrays: mx.array) -> mx.array:
            return self.with_parameters(names, arrays, lambda: call(x))

        out: mx.array = mx.checkpoint(inner)(x, *(self[name] for name in names))
        return out

    def _backward_place(self, name: str) -> tuple[int, str]:
        """Return the place of a gradient: head and norm, layers from the last, embedding."""
        if name.startswith(self._layer_prefix):
            return -int(name.removeprefix(self._layer_prefix).partition(".")[0]), name
        return (1 if name.startswith(self._embedding_prefix) else -1_000_000), name


def _without_adapter(name: str) -> str:
    """Return the name of a parameter in a module without adapters, which hold it in a module of
    their own: ``q_proj.linear.weight`` is ``q_proj.weight``."""
    path, _, leaf = name.rpartition(".")
    return f"{path.rpartition('.')[0]}.{leaf}"
