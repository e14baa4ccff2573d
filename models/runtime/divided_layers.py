"""Give a rank its share of the layers of a slice, and let the group sum what the shares give.

Only numbers change: weights become smaller, attention counts fewer heads, and two matrices of a
layer are followed by a sum. The code of a layer stays mlx-lm's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from shardmlx.compat import COVERED
from shardmlx.errors import refusing
from shardmlx.models.runtime.slice import Piece, Slice, Sum
from shardmlx.models.runtime.stand_ins import at
from shardmlx.models.runtime.tuner import DoRALinear
from shardmlx.models.sizes.layer_shape import Heads
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import Cut, TensorShares, summed


def take_share(
    part: Slice, shape: ModelShape, shares: TensorShares, rank: int, all_sum: Sum
) -> None:
    """Leave the layers of ``part`` the share of a ``rank`` of a group, of a model of ``shape``.
    Nothing is read. Raises ``UserError`` where mlx-lm's code does not take it."""
    own = shares.of(shape, rank)
    part.share = f".{rank}"
    for i, layer in part.layers.items():
        heads = shape.layer(i).heads
        fewer = own.layer(i).heads
        cuts = shares.cuts(shape.layer(i), rank)
        for path, cut in cuts.items():
            for name in part.names_in(i, path):
                _take(part, name, cut, is_first=rank == 0)
            if cut.of == "inputs" and isinstance(adapted := at(layer, path), DoRALinear):
                _norm_whole_rows(adapted, all_sum)
        experts = {
            path.rpartition(".")[0]: cut for path, cut in cuts.items() if cut.of == "experts"
        }
        for path, cut in experts.items():
            _hold_experts(at(layer, path), *cut.ranges[0])
        values, mlp = summed(shape.layer(i))
        for path in (values, mlp):
            _around(at(layer, path), _unchanged, all_sum)
            if part.training:
                block = path.rpartition(".")[0] or path
                _around(at(layer, block), _sum_of_gradients(all_sum), _unchanged)
                whole = set(part.names_in(i, block)) - part.pieces.keys()
                part.partial += tuple(name for name in part.trainable if name in whole)
        _count_heads(at(layer, values.rpartition(".")[0]), heads, fewer)
    part.all_sum = all_sum
    _check(part, own)


def _take(part: Slice, name: str, cut: Cut, *, is_first: bool) -> None:
    """Leave a slice the rank's piece of a parameter of a matrix."""
    array = part[name]
    leaf = name.rpartition(".")[2]
    if cut.of == "inputs" and leaf == "bias":  # which one rank adds, and trains
        if is_first:
            part.pieces[name] = Piece(((0, len(array)),), len(array), 0)
        else:
            part[name] = mx.zeros_like(array)
            part.trainable = tuple(each for each in part.trainable if each != name)
    elif (axis := _axis(array, leaf, cut)) is not None:
        size = array.shape[axis]
        part.pieces[name] = piece = Piece(cut.scaled(size), size, axis)
        part[name] = piece.of(array)
        if name in part.stored:
            part.stored[name] = piece.of(part.stored[name])


def _axis(array: mx.array, leaf: str, cut: Cut) -> int | None:
    """Return the side along which an array of a matrix is divided, by its own name there."""
    is_stacked = array.ndim > 2
    whole = ("lora_b", "m") if cut.of == "inputs" else ("lora_a",)
    if leaf in ("global_scale", *whole) and cut.of != "experts":
        return None
    if leaf in ("lora_a", "lora_b") and not is_stacked:
        return 0 if cut.of == "inputs" else 1
    return cut.axis(array.ndim, leaf)


def _around(module: nn.Module, before: Sum, after: Sum) -> None:
    """Let a module take what ``before`` makes of its input, and return what ``after`` makes of what
    its class returns. Its functions can still be bound otherwise."""
    kind: Any = type(module)
    is_first = not hasattr(kind, COVERED)

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        own = getattr(self, COVERED) if is_first else partial(kind.__call__, self)
        return after(own(before(x), *args, **kwargs))

    covered = {COVERED: kind.__call__} if is_first else {}
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, **covered})


def _norm_whole_rows(module: DoRALinear, all_sum: Sum) -> None:
    """Let DoRA norm the rows of a matrix of which each rank of the group has some columns."""
    kind: Any = type(module)

    def call(self: Any, x: mx.array) -> mx.array:
        weight = self._dequantized_weight()
        added = (self.dropout(x) @ self.lora_a) @ self.lora_b
        out: mx.array = x @ weight.T + (self.scale * added).astype(x.dtype)
        adapted = weight + (self.scale * self.lora_b.T) @ self.lora_a.T
        squares = mx.square(adapted.astype(mx.float32)).sum(axis=1)
        norms = mx.sqrt(all_sum(mx.stop_gradient(squares)))
        out = (self.m / norms).astype(x.dtype) * out
        return out + self.linear.bias if "bias" in self.linear else out

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _hold_experts(module: nn.Module, first: int, last: int) -> None:
    """Let a module of all experts compute those alone that a rank has: the others add nothing."""
    kind: Any = type(module)

    def call(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        own = indices.astype(mx.int32) - first
        is_here = (own >= 0) & (own < last - first)
        # In the place of another rank's expert one that the token takes here, if there is one: its
        # weights are read anyway.
        present = mx.where(is_here, own, 0).max(axis=-1, keepdims=True)
        found = kind.__call__(self, x, mx.where(is_here, own, present))
        return mx.where(is_here[..., None], found, 0)

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _unchanged(x: mx.array) -> mx.array:
    return x


def _sum_of_gradients(all_sum: Sum) -> Sum:
    """Return a function that changes no input, and sums its gradients over the group: each rank has
    a part of what takes it. MLX's sum itself passes gradients on as they are."""

    def summed(x: mx.array, gradient: mx.array, _: mx.array) -> mx.array:
        return all_sum(gradient)

    same: Any = mx.custom_function(_unchanged)
    same.vjp(summed)
    unchanged: Sum = same
    return unchanged


def _count_heads(attention: nn.Module, heads: Heads, fewer: Heads) -> None:
    """Set the numbers of heads in the code of attention, whatever a family calls them."""
    for module in attention.modules():
        for name, number in vars(module).items():
            if "head" not in name or "dim" in name or not isinstance(number, int):
                continue
            if "k" in name.partition("head")[0] and number == heads.keys:
                setattr(module, name, fewer.keys)
            elif number == heads.queries:
                setattr(module, name, fewer.queries)


def _check(part: Slice, own: ModelShape) -> None:
    """Raise ``UserError`` unless a step adds keys and values of as many heads as planned."""
    caches = part.new_caches()
    training = part.training
    part.train(False)  # dropout would need keys
    with refusing(
        f"--tensor-parallel: mlx-lm's code of {own.model_type} takes no part of its heads",
        "leave it out: stages divide the model by layers",
    ):
        part.try_step(caches)
        found = {cache.keys.shape[1] for cache in caches if hasattr(cache, "keys")}
        wanted = {own.layer(i).heads.keys for i in part.layers}
        if not found <= wanted:
            raise ValueError(f"its caches have {found} heads")
    part.train(training)
