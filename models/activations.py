"""Functions that MLX computes slowly on a CPU without Apple's libraries, computed faster there.

An exponential takes 25 ns there, and a product of two numbers less than one: SwiGLU alone takes a
fifth of a small layer's time. Elsewhere, and in 16 bits, mlx-lm's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from shardmlx.compat import calls, rebind

Gated = Callable[[mx.array, mx.array], mx.array]
Arrays = Sequence[mx.array]


def with_gradient(function: Callable[..., Any], gradient: Callable[..., Any]) -> Any:
    """Return a function whose gradient another one computes."""
    own: Any = mx.custom_function(function)
    own.vjp(gradient)
    return own


def is_slow(dtype: mx.Dtype) -> bool:
    """Tell whether MLX is slow at exponentials of this type."""
    return mx.default_device() == mx.cpu and dtype == mx.float32


def exponential(x: mx.array) -> mx.array:
    """Return e to the power of ``x``. MLX's powers of two take 0.4 of the time of slow ones."""
    return mx.power(2.0, x * 1.4426950408889634) if is_slow(x.dtype) else mx.exp(x)


def sigmoid(x: mx.array) -> mx.array:
    """Return the logistic function of ``x``."""
    return 1 / (1 + exponential(-x))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return SiLU of ``gate``, times ``up``: both (..., F).

    If MLX is slow at it, the sigmoid is computed once, and kept for the gradients.
    """
    is_ours = is_slow(gate.dtype)
    out: mx.array = _with_sigmoid(gate, up)[0] if is_ours else activations.swiglu(gate, up)
    return out


def _compute(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    weights = sigmoid(gate)
    return gate * weights * up, weights


def _gradients(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
    gate, up = primals
    return swiglu_gradients(gate, up, outputs[1], cotangents[0])


_with_sigmoid = with_gradient(_compute, _gradients)


def swiglu_gradients(
    gate: mx.array, up: mx.array, weights: mx.array, cotangent: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the gradients of SwiGLU for ``gate`` and ``up``; ``cotangent`` is its output's,
    ``weights`` are the gate's sigmoid."""
    silu = gate * weights
    return cotangent * up * (weights + silu * (1 - weights)), cotangent * silu


def use_swiglu(layer: nn.Module, function: Gated) -> None:
    """Make the MLPs of a layer call ``function`` in place of mlx-lm's SwiGLU, from now on."""
    for module in layer.modules():
        for name, child in module.children().items():
            if isinstance(child, nn.Module) and not child.children() and calls(child, "swiglu"):
                # mlx-lm's activation of experts is one object for all models.
                module[name] = copy(child)
                rebind(module[name], "swiglu", function)
        if module.children() and calls(module, "swiglu"):
            rebind(module, "swiglu", function)
