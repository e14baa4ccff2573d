"""Record what the modules of a layer of mlx-lm's take and give, in place of themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from shardmlx.compat import calls, rebind
from shardmlx.models.runtime.attention import attend
from shardmlx.models.runtime.carried import first_argument
from shardmlx.models.runtime.decoder import ATTENTION
from shardmlx.models.runtime.stand_ins import InPlaceOf, at

TOKENS = 3
"""Tokens of the trace: so few that mlx-lm does not sort them by expert."""

_NORMS = ("rms_norm", "layer_norm")


class LayerCalls:
    """Calls of a layer's modules and of its attention, from now on; ``functions`` are those of the
    activations whose calls are looked for."""

    def __init__(self, layer: nn.Module, functions: Collection[str]) -> None:
        named = [*layer.named_modules()]
        self.sides = {path: array.shape for path, array in tree_flatten(layer.parameters())}
        self.mixers = [
            path
            for path, each in named
            if path and takes(each, "cache") and (_attends(each) or not _goes_up_and_down(each))
        ]
        self.recurrent = [path for path in self.mixers if not _attends(at(layer, path))]
        self.has_matrices = any(calls(each, "ssm_update", "_ssm") for _, each in named)
        self.activations = {name for name in functions for _, each in named if calls(each, name)}
        self.modules = {path: each for path, each in named if _is_counted(each)}
        self.given: dict[str, mx.array] = {}
        self.outputs: dict[str, mx.array] = {}
        self.attended: list[tuple[mx.array, mx.array, mx.array, Any]] = []
        """Queries, keys, values and mask."""
        self.has_sinks = False
        self.normed = 0
        """Elements of a token that attention norms without weights."""
        self._watch_functions(named)
        self._watch_modules(layer)

    @property
    def linears(self) -> list[str]:
        """The paths of the linear layers that were called, in the order of the calls."""
        return [path for path in self.given if is_linear(self.modules[path])]

    @property
    def mixed(self) -> dict[str, str]:
        """The mixer in which each such linear layer is, by path, if it is in one."""
        return {
            path: mixer
            for mixer in self.mixers
            for path in self.linears
            if path.startswith(f"{mixer}.")
        }

    def _watch_functions(self, named: list[tuple[str, nn.Module]]) -> None:
        norms = {name: partial(self._norm, getattr(mx.fast, name)) for name in _NORMS}
        watched = InPlaceOf(mx, mx.array, fast=InPlaceOf(mx.fast, mx.array, **norms))
        attending = {*self.mixers} - {*self.recurrent}
        for path, module in named:
            if calls(module, ATTENTION):
                rebind(module, ATTENTION, self._attention)
            if path in attending and _norms(module) and calls(module, "mx"):
                rebind(module, "mx", watched)

    def _watch_modules(self, layer: nn.Module) -> None:
        # Children first: a stand-in has none.
        for path, module in reversed(self.modules.items()):
            parent, _, name = path.rpartition(".")
            holder = at(layer, parent)
            stand_in = InPlaceOf(module, partial(self._call, path))
            holder[int(name) if isinstance(holder, list) else name] = stand_in

    def _call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        out = self.modules[path](*args, **kwargs)
        self.given.setdefault(path, first_argument(*args, **kwargs))
        self.outputs.setdefault(path, out)
        return out

    def _norm(self, norm: Callable[..., mx.array], x: mx.array, *args: Any, **how: Any) -> mx.array:
        self.normed += x.size // TOKENS
        return norm(x, *args, **how)

    def _attention(self, q: Any, k: Any, v: Any, *args: Any, **how: Any) -> mx.array:
        self.attended.append((q, k, v, how["mask"]))
        self.has_sinks |= how.get("sinks") is not None
        return attend(q, k, v, *args, **how)


def _attends(module: nn.Module) -> bool:
    return any(calls(each, ATTENTION) for each in module.modules())


def _is_counted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a norm."""
    if "weight" in module and (is_linear(module) or module.weight.ndim == 1):
        return True
    has_linears = any(map(is_linear, module.modules()))
    return _norms(module) and not has_linears and bool(module.parameters())


def _goes_up_and_down(module: nn.Module) -> bool:
    """Return whether a module is an MLP without a gate. That of RWKV takes a cache, too."""
    sides = [each.weight.shape for each in module.modules() if is_linear(each)]
    return len(sides) == 2 and sides[0] == sides[1][::-1]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a stack of them for experts."""
    return hasattr(module, "to_quantized")


def _norms(module: nn.Module) -> bool:
    """Return whether the code of a module calls a norm of MLX."""
    return any(calls(module, name) for name in _NORMS)


def takes(module: nn.Module, name: str) -> bool:
    """Return whether a module takes a ``cache``, as attention and recurrent layers do, or an
    ``offset``, as rotary embeddings."""
    return name in signature(type(module).__call__).parameters
