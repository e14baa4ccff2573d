"""Dropout whose mask at a row and a position depends on these alone, not on the layout.

Every (row of the global batch, position) has its own key, so that micro-batches, padding and
replicas do not change a mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from shardmlx.compat import keep_probability
from shardmlx.models.runtime.traced_positions import Places


class KeyedDropout(nn.Module):
    """Dropout of arrays (rows, T, ...) that draws masks from keys, set before each call."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        # Not parameters: MLX leaves out names that begin with an underscore.
        self._keep = keep
        self._order: tuple[tuple[int, ...], mx.array] | None = None

    def set_starts(self, starts: mx.array, places: Places | None = None) -> None:
        """Draw the next mask from ``starts``, uint32 (2,): one with a row's number added, and one
        with a position's. It may be an input of a graph that is compiled."""
        self._starts = starts
        self._places = places

    def set_order(self, shape: tuple[int, ...], order: mx.array) -> None:
        """Expect (rows, T, experts, ...) = ``shape`` next, flattened and permuted to ``order``."""
        self._order = (shape, order)

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training:
            return x
        if self._order is None:
            mask = self._mask(x.shape)
        else:
            shape, order = self._order
            self._order = None
            mask = self._mask((*shape, *x.shape[1:])).flatten(0, len(shape) - 1)[order]
        return mask * x * (1 / self._keep)

    def _mask(self, shape: Sequence[int]) -> mx.array:
        draw = mx.vmap(partial(mx.random.bernoulli, self._keep, tuple(shape[2:])))
        mask: mx.array = draw(self._keys(*shape[:2]))
        return mask.reshape(shape)

    def _keys(self, rows: int, length: int) -> mx.array:
        """Return keys (rows x length, 2): one half with the row added, the other the position."""
        if self._places is None:
            numbers = mx.meshgrid(mx.arange(rows), mx.arange(length), indexing="ij")
        else:
            numbers = (mx.array(self._places.rows), mx.array(self._places.positions))
        halves = [each.astype(mx.uint32) + self._starts[i] for i, each in enumerate(numbers)]
        return mx.stack(halves, axis=-1).reshape(-1, 2)


class KeyedExperts(SwitchGLU):
    """A ``SwitchGLU`` that tells the dropouts in it the row and position of each vector."""

    def __init__(self, experts: SwitchGLU) -> None:
        nn.Module.__init__(self)
        for name, child in experts.items():
            self[name] = child
        self.train(experts.training)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Pass (rows, T, D) through the experts of each token (rows, T, E): (rows, T, E, D).

        Tokens are always sorted by expert; mlx-lm does not sort few tokens.
        """
        indices = mx.stop_gradient(indices)
        order = mx.argsort(indices.flatten())
        experts = indices.flatten()[order]

        projections = [self[name] for name in ("up_proj", "gate_proj", "down_proj")]
        for each in projections:
            dropout = each.get("dropout")
            if isinstance(dropout, KeyedDropout) and dropout.training:
                dropout.set_order(indices.shape, order)
        up, gate, down = (partial(each, sorted_indices=True) for each in projections)
        x = x.flatten(0, 1)[order // indices.shape[-1]][:, None, :]
        x = self.activation(up(x, experts), gate(x, experts))
        x = down(x, experts)[mx.argsort(order)]
        return x.reshape(*indices.shape, -1)


def key_every_dropout(layer: nn.Module) -> list[KeyedDropout]:
    """Replace each active ``nn.Dropout`` inside ``layer``; returns them in order.

    Dropouts replaced earlier, for another slice of the same model, are returned too.
    """
    found = []
    for _, module in sorted(layer.named_modules(), key=lambda item: item[0]):
        for name, child in sorted(module.children().items()):
            if _is_active(child):
                module[name] = KeyedDropout(keep_probability(child))
                module[name].train(child.training)
            elif type(child) is SwitchGLU and any(map(_is_active, child.modules())):
                module[name] = KeyedExperts(child)
            if isinstance(module[name], KeyedDropout):
                found.append(module[name])
    return found


def _is_active(module: Any) -> bool:
    return isinstance(module, nn.Dropout) and keep_probability(module) < 1


def starts_of(count: int, *parts: int, first_row: int = 0) -> np.ndarray:
    """Return the numbers from which ``count`` dropouts draw, uint32 (count, 2), by ``parts``: seed,
    step and layer; rows count globally, from ``first_row``."""
    starts = np.empty((count, 2), np.uint32)
    for index in range(count):
        digest = hashlib.blake2b(repr((*parts, index)).encode(), digest_size=8).digest()
        starts[index, 0] = (int.from_bytes(digest[:4]) + first_row) % 2**32
        starts[index, 1] = int.from_bytes(digest[4:])
    return starts


def set_keys(dropouts: Sequence[KeyedDropout], *parts: int, first_row: int = 0) -> None:
    """Give each dropout its own key, of ``parts``, as ``starts_of`` does."""
    starts = mx.array(starts_of(len(dropouts), *parts, first_row=first_row))
    for i, dropout in enumerate(dropouts):
        dropout.set_starts(starts[i])
