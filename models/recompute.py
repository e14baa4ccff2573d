"""Selective recomputation: hold what matrix products made, compute again what is cheap.

Beside attention's scores, which pieces never hold, the large and cheap arrays of a layer are those
of RMSNorm and SwiGLU (Korthikanti et al., arXiv:2205.05198). Here both keep their inputs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from shardmlx.models.activations import sigmoid, swiglu_gradients, use_swiglu


def recompute_selectively(layer: nn.Module) -> None:
    """Let the norms and activations of a layer keep their inputs alone, from now on."""
    use_swiglu(layer, swiglu)
    for module in layer.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = RecomputedRMSNorm


class RecomputedRMSNorm(nn.RMSNorm):
    """An RMSNorm that is computed again in the backward pass."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return the norm of ``x`` (..., D)."""
        norm: Any = mx.checkpoint(self._norm)
        out: mx.array = norm(x, self["weight"])
        return out

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self.eps)


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
    # Not before the gradient is there: else MLX would compute the sigmoid well ahead, and hold it.
    gate, up = mx.depends(list(primals), [cotangent])
    return swiglu_gradients(gate, up, sigmoid(gate), cotangent)
