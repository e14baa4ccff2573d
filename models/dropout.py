"""Dropout whose mask depends on a given key alone, not on who computed what before."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import mlx.nn as nn


class KeyedDropout(nn.Module):
    """``nn.Dropout`` that draws its mask from ``key``, which must be set before each call."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self._keep = 1 - p
        self._key: mx.array | None = None

    @property
    def key(self) -> mx.array | None:
        return self._key

    @key.setter
    def key(self, key: mx.array) -> None:
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training:
            return x
        return mx.random.bernoulli(self._keep, x.shape, self._key) * x * (1 / self._keep)


def key_every_dropout(layer: nn.Module) -> list[KeyedDropout]:
    """Replace each active ``nn.Dropout`` inside ``layer``; returns them in order."""
    found = []
    for _, module in sorted(layer.named_modules(), key=lambda item: item[0]):
        for name, child in sorted(module.children().items()):
            if isinstance(child, nn.Dropout) and child._p_1 < 1:
                module[name] = KeyedDropout(1 - child._p_1)
                module[name].train(child.training)
                found.append(module[name])
    return found


def dropout_key(*parts: int) -> mx.array:
    """A random key that depends on all of ``parts``, such as (seed, step, first row, layer)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return mx.array([int.from_bytes(digest[:4]), int.from_bytes(digest[4:])], mx.uint32)
