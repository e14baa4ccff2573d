"""Dropout whose mask depends on a given key alone, not on who computed what before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn


class KeyedDropout(nn.Module):
    """``nn.Dropout`` that draws its mask from a key, which must be set before each call."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self._keep = keep

    def set_key(self, key: mx.array) -> None:
        """Draw the next mask from ``key``."""
        # Not a parameter: MLX leaves out names that begin with an underscore.
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training:
            return x
        return mx.random.bernoulli(self._keep, x.shape, self._key) * x * (1 / self._keep)


def key_every_dropout(layer: nn.Module) -> list[KeyedDropout]:
    """Replace each active ``nn.Dropout`` inside ``layer``; returns them in order.

    Those replaced before, for another slice of the same model, are returned too.
    """
    found = []
    for _, module in sorted(layer.named_modules(), key=lambda item: item[0]):
        for name, child in sorted(module.children().items()):
            if isinstance(child, nn.Dropout) and child._p_1 < 1:
                module[name] = KeyedDropout(child._p_1)
                module[name].train(child.training)
            if isinstance(module[name], KeyedDropout):
                found.append(module[name])
    return found


def set_keys(dropouts: Sequence[KeyedDropout], *parts: int) -> None:
    """Give each of ``dropouts`` a key of its own, out of ``dropout_key(*parts)``."""
    if dropouts:
        keys = mx.random.split(dropout_key(*parts), len(dropouts))
        for dropout, key in zip(dropouts, keys, strict=True):
            dropout.set_key(key)


def dropout_key(*parts: int) -> mx.array:
    """A random key that depends on all of ``parts``, such as (seed, step, first row, layer)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return mx.array([int.from_bytes(digest[:4]), int.from_bytes(digest[4:])], mx.uint32)
