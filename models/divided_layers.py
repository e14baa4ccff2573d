"""Give a rank its share of the layers of a slice, and let the group sum what the shares give.

Only numbers change: weights become smaller, attention counts fewer heads, and two matrices of a
layer are followed by a sum. The code of a layer stays mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from shardmlx.errors import UserError, one_line
from shardmlx.models.layer_shape import Heads
from shardmlx.models.shape import ModelShape
from shardmlx.models.shares import Cut, Ranges, TensorShares, summed
from shardmlx.models.slice import Slice
from shardmlx.models.stand_ins import at

Sum = Callable[[mx.array], mx.array]
"""A lazy sum over the ranks of a group."""


def take_share(
    part: Slice, shape: ModelShape, shares: TensorShares, rank: int, all_sum: Sum
) -> None:
    """Leave the layers of ``part`` the share of a ``rank`` of a group, of a model of ``shape``.
    Nothing is read. Raises ``UserError`` where mlx-lm's code does not take it."""
    own = shares.of(shape, rank)
    part.share = f".{rank}"
    for i, layer in part.layers.items():
        heads, fewer = shape.layer(i).heads, own.layer(i).heads
        for path, cut in shares.cuts(shape.layer(i), rank).items():
            for name in part.names_in(i, path):
                leaf = name.rpartition(".")[2]
                part[name] = _share_of(part[name], leaf, cut, is_first=rank == 0)
        values, mlp = summed(shape.layer(i))
        for path in (values, mlp):
            _sum_outputs(at(layer, path), all_sum)
        _count_heads(at(layer, values.rpartition(".")[0]), heads, fewer)
    _check(part, own)


def _share_of(array: mx.array, leaf: str, cut: Cut, *, is_first: bool) -> mx.array:
    """Return the rank's part of an array of a matrix, by the array's own name in its module."""
    stacked = array.ndim > 2
    if leaf == "m":
        raise UserError("DoRA norms whole rows, of which each rank has a part", "use LoRA")
    if leaf == "global_scale":
        return array
    if not cut.of_columns:
        if leaf == "lora_a":
            return array
        axis = array.ndim - 1 if leaf == "bias" or (leaf == "lora_b" and not stacked) else -2
        return _taken(array, cut, axis if array.ndim > 1 else 0)
    if leaf == "bias":  # which one rank adds
        return array if is_first else mx.zeros_like(array)
    if leaf == "lora_b":
        return array
    return _taken(array, cut, 0 if leaf == "lora_a" and not stacked else -1)


def _taken(array: mx.array, cut: Cut, axis: int) -> mx.array:
    ranges: Ranges = cut.scaled(array.shape[axis])
    parts = [mx.take(array, mx.arange(start, stop), axis=axis) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _sum_outputs(module: nn.Module, all_sum: Sum) -> None:
    """Let a module return the group's sum of what its class returns."""
    kind: Any = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        return all_sum(kind.__call__(self, *args, **kwargs))

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


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
    inputs = mx.zeros((1, 1, part.hidden_size), part.dtype)
    try:
        part.extend(mx.zeros((1, 1), mx.int32) if part.is_first else inputs, caches)
        found = {cache.keys.shape[1] for cache in caches if hasattr(cache, "keys")}
        wanted = {own.layer(i).heads.keys for i in part.layers}
        if not found <= wanted:
            raise ValueError(f"its caches have {found} heads")
    except Exception as error:  # a model's code may raise whatever it likes
        raise UserError(
            f"--tensor-parallel: mlx-lm's code of {own.model_type} takes no part of its heads "
            f"({one_line(error)})",
            "leave it out: stages divide the model by layers",
        ) from None
