"""Selective recomputation: hold outputs of matrix products, recompute cheap arrays.

Beside attention's scores, which pieces never hold, the large and cheap arrays of a layer are those
of RMSNorm and SwiGLU (Korthikanti et al., arXiv:2205.05198). Here both keep only their inputs; so
does an MLP whose last matrix is trained, instead of that matrix's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from shardmlx.compat import uses_only
from shardmlx.models.activations import sigmoid, swiglu_gradients, use_swiglu

MLP_NAMES = ("gate_proj", "up_proj", "swiglu", "down_proj")
"""Names that mlx-lm's gated MLP uses: ``down_proj(swiglu(gate_proj(x), up_proj(x)))``."""


def recompute_selectively(layer: nn.Module) -> None:
    """Make the norms and activations of a layer keep only their inputs, from now on."""
    for module in layer.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = RecomputedRMSNorm
        elif uses_only(module, MLP_NAMES) and is_trained_linear(module.down_proj):
            module.__class__ = RecomputedMLP
    use_swiglu(layer, swiglu)


def is_trained_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer whose own weight is trained, not an adapter's."""
    return type(module) is nn.Linear and "weight" in module.trainable_parameters()


class RecomputedRMSNorm(nn.RMSNorm):
    """An RMSNorm that is recomputed in the backward pass."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return the norm of ``x`` (..., D)."""
        norm: Any = mx.checkpoint(self._norm)
        out: mx.array = norm(x, self["weight"])
        return out

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self.eps)


class RecomputedMLP(nn.Module):
    """A gated MLP that holds the inputs of its SwiGLU, and recomputes the product."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return the MLP's answer to ``x`` (..., D)."""
        function: Any = mx.custom_function(_swiglu_and_linear)
        function.vjp(_gradients_with_linear)
        linear = [self.down_proj[name] for name in ("weight", "bias") if name in self.down_proj]
        out: mx.array = function(self.gate_proj(x), self.up_proj(x), *linear)
        return out


def _swiglu_and_linear(gate: mx.array, up: mx.array, *linear: mx.array) -> mx.array:
    return _linear(_swiglu(gate, up), *linear)


def _linear(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def _gradients_with_linear(
    primals: Sequence[mx.array], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, ...]:
    gate, up, *linear = primals
    # Wait for the gradient: otherwise MLX would compute the product well ahead, and hold it.
    gate, up = mx.depends([gate, up], [cotangent])
    weights = sigmoid(gate)
    product = gate * weights * up
    _, (of_product, *of_linear) = mx.vjp(_linear, [product, *linear], [cotangent])
    gradients = swiglu_gradients(gate, up, weights, of_product)
    # I computes the product that W needs, since W would hold two arrays for it.
    return (*mx.depends(list(gradients), [product]), *of_linear)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return SiLU of ``gate``, times ``up``: both (..., F)."""
    function: Any = mx.custom_function(_swiglu)
    function.vjp(_gradients)
    out: mx.array = function(gate, up)
    return out


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * sigmoid(gate) * up


def _gradients(
    primals: Sequence[mx.array], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array]:
    # Wait for the gradient: otherwise MLX would compute the sigmoid well ahead, and hold it.
    gate, up = mx.depends(list(primals), [cotangent])
    return swiglu_gradients(gate, up, sigmoid(gate), cotangent)
