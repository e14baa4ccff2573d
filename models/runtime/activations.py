"""SwiGLU, RMSNorm and MLPs that are faster than mlx-lm's, or keep less for the backward pass.

An exponential takes MLX 25 ns on a CPU without Apple's libraries, and a product of two numbers less
than one: SwiGLU alone takes a fifth of a small layer's time. It is computed faster there;
elsewhere, and in 16 bits, mlx-lm's own code runs.

Selective recomputation holds outputs of matrix products, and recomputes cheap arrays. Beside
attention's scores, which pieces never hold, the large ones of a layer are those of RMSNorm and
SwiGLU (Korthikanti et al., arXiv:2205.05198). Here both keep only their inputs; so does an MLP
whose last matrix is trained, instead of that matrix's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from shardmlx.compat import call_as, calls, rebind, uses_only

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
    """Return 1 / (1 + exp(-x)), to 1e-6."""
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
    """Return gradients for ``gate`` and ``up``; ``weights`` are the gate's sigmoid."""
    silu = gate * weights
    return cotangent * up * (weights + silu * (1 - weights)), cotangent * silu


def use_swiglu(layer: nn.Module, function: Gated) -> None:
    """Make the MLPs of a layer call ``function`` in place of mlx-lm's SwiGLU, from now on."""
    for module in layer.modules():
        for name, child in module.children().items():
            if isinstance(child, nn.Module) and calls(child, "swiglu") and not child.parameters():
                # mlx-lm's activation of experts is one object for all models.
                module[name] = copy(child)
                rebind(module[name], "swiglu", function)
        if calls(module, "swiglu") and module.parameters():
            rebind(module, "swiglu", function)


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
            if isinstance(down, nn.Linear) and "weight" in down.trainable_parameters():
                call_as(module, RecomputedMLP)
                call_as(down, LinearOfProduct)
    use_swiglu(layer, recomputed_swiglu)


class RecomputedRMSNorm(nn.RMSNorm):
    """An RMSNorm that is recomputed in the backward pass."""

    def __call__(self, x: mx.array) -> mx.array:
        norm: Any = mx.checkpoint(partial(mx.fast.rms_norm, eps=self.eps))
        out: mx.array = norm(x, self["weight"])
        return out


class RecomputedMLP(nn.Module):
    """A gated MLP that holds the inputs of its SwiGLU, and recomputes the product."""

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(self.gate_proj(x), self.up_proj(x))
        return out


class LinearOfProduct(nn.Module):
    """The last matrix of such an MLP, which takes both inputs of the product."""

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        linear = [self[name] for name in ("weight", "bias") if name in self]
        out: mx.array = _swiglu_and_linear(gate, up, *linear)
        return out


def _linear(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return _compute(gate, up)[0]


def _gradients_of_inputs(primals: Arrays, cotangent: mx.array, output: mx.array) -> Arrays:
    # Wait for the gradient: otherwise MLX would compute the sigmoid well ahead, and hold it.
    gate, up = mx.depends(list(primals), [cotangent])
    return swiglu_gradients(gate, up, sigmoid(gate), cotangent)


recomputed_swiglu: Gated = with_gradient(_swiglu, _gradients_of_inputs)
"""SiLU of a gate, times ``up``, which keeps only these two."""


def _product(gate: mx.array, up: mx.array, *linear: mx.array) -> mx.array:
    return _linear(_swiglu(gate, up), *linear)


def _gradients_with_linear(primals: Arrays, cotangent: mx.array, output: mx.array) -> Arrays:
    gate, up, *linear = primals
    gate, up = mx.depends([gate, up], [cotangent])
    product, weights = _compute(gate, up)
    _, (of_product, *of_linear) = mx.vjp(_linear, [product, *linear], [cotangent])
    gradients = swiglu_gradients(gate, up, weights, of_product)
    # I computes the product that W needs, since W would hold two arrays for it.
    return (*mx.depends(list(gradients), [product]), *of_linear)


_swiglu_and_linear = with_gradient(_product, _gradients_with_linear)
