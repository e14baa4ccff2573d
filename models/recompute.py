"""Selective recomputation: hold outputs of matrix products, recompute cheap arrays.

Beside attention's scores, which pieces never hold, the large and cheap arrays of a layer are those
of RMSNorm and SwiGLU (Korthikanti et al., arXiv:2205.05198). Here both keep only their inputs; so
does an MLP whose last matrix is trained, instead of that matrix's input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from shardmlx.compat import uses_only
from shardmlx.models.activations import (
    Arrays,
    Gated,
    sigmoid,
    swiglu_gradients,
    use_swiglu,
    with_gradient,
)

_MLP_NAMES = ("gate_proj", "up_proj", "swiglu", "down_proj")
"""Names that mlx-lm's gated MLP uses: ``down_proj(swiglu(gate_proj(x), up_proj(x)))``."""


def recompute_selectively(layer: nn.Module) -> None:
    """Make the norms and activations of a layer keep only their inputs, from now on."""
    for module in layer.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = RecomputedRMSNorm
        elif uses_only(module, _MLP_NAMES):
            down = module.down_proj
            # An adapter may be trained in place of the matrix.
            if type(down) is nn.Linear and "weight" in down.trainable_parameters():
                module.__class__ = RecomputedMLP
    use_swiglu(layer, swiglu)


class RecomputedRMSNorm(nn.RMSNorm):
    """An RMSNorm that is recomputed in the backward pass."""

    def __call__(self, x: mx.array) -> mx.array:
        norm: Any = mx.checkpoint(partial(mx.fast.rms_norm, eps=self.eps))
        out: mx.array = norm(x, self["weight"])
        return out


class RecomputedMLP(nn.Module):
    """A gated MLP that holds the inputs of its SwiGLU, and recomputes the product."""

    def __call__(self, x: mx.array) -> mx.array:
        linear = [self.down_proj[name] for name in ("weight", "bias") if name in self.down_proj]
        out: mx.array = _swiglu_and_linear(self.gate_proj(x), self.up_proj(x), *linear)
        return out


def _linear(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * sigmoid(gate) * up


def _gradients(primals: Arrays, cotangent: mx.array, output: mx.array) -> Arrays:
    # Wait for the gradient: otherwise MLX would compute the sigmoid well ahead, and hold it.
    gate, up = mx.depends(list(primals), [cotangent])
    return swiglu_gradients(gate, up, sigmoid(gate), cotangent)


swiglu: Gated = with_gradient(_swiglu, _gradients)
"""SiLU of a gate, times ``up``, which keeps only these two."""


def _compute(gate: mx.array, up: mx.array, *linear: mx.array) -> mx.array:
    return _linear(_swiglu(gate, up), *linear)


def _gradients_with_linear(primals: Arrays, cotangent: mx.array, output: mx.array) -> Arrays:
    gate, up, *linear = primals
    gate, up = mx.depends([gate, up], [cotangent])
    weights = sigmoid(gate)
    product = gate * weights * up
    _, (of_product, *of_linear) = mx.vjp(_linear, [product, *linear], [cotangent])
    gradients = swiglu_gradients(gate, up, weights, of_product)
    # I computes the product that W needs, since W would hold two arrays for it.
    return (*mx.depends(list(gradients), [product]), *of_linear)


_swiglu_and_linear = with_gradient(_compute, _gradients_with_linear)
