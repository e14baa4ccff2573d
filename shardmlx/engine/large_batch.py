"""Optimizers for large batches: each weight's step is in proportion to the weight.

Batches are global, so more replicas need neither; a larger ``--batch-size`` may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

Rate = float | Callable[[mx.array], mx.array]


class LAMB(Optimizer):
    """Adam with decoupled decay, its step scaled by the norm of the weight (You et al.,
    arXiv:1904.00962, algorithm 2, with the function of the norm that changes nothing)."""

    def __init__(
        self,
        learning_rate: Rate,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Make the two moments of a weight."""
        state["m"] = mx.zeros_like(parameter)
        state["v"] = mx.zeros_like(parameter)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        """Return an updated weight."""
        b1, b2 = self.betas
        state["m"] = m = b1 * state["m"] + (1 - b1) * gradient
        state["v"] = v = b2 * state["v"] + (1 - b2) * mx.square(gradient)
        c1 = (1 - b1**self.step).astype(gradient.dtype)
        c2 = (1 - b2**self.step).astype(gradient.dtype)
        update = (m / c1) / (mx.sqrt(v / c2) + self.eps) + self.weight_decay * parameter
        rate = self.learning_rate.astype(gradient.dtype)
        updated: mx.array = parameter - rate * _ratio(_norm(parameter), _norm(update)) * update
        return updated


class LARS(Optimizer):
    """SGD with momentum, the gradient of each weight scaled to a share of its norm (You et al.,
    arXiv:1708.03888)."""

    def __init__(
        self,
        learning_rate: Rate,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.trust_coefficient = trust_coefficient
        self.eps = eps

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Make the momentum of a weight."""
        state["v"] = mx.zeros_like(parameter)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        """Return an updated weight."""
        weight = _norm(parameter)
        size = _norm(gradient) + self.weight_decay * weight + self.eps
        share = _ratio(self.trust_coefficient * weight, size)
        step = share * (gradient + self.weight_decay * parameter)
        state["v"] = v = self.momentum * state["v"] + step
        updated: mx.array = parameter - self.learning_rate.astype(gradient.dtype) * v
        return updated


def _norm(array: mx.array) -> mx.array:
    """Return the Euclidean norm, in the array's type: row by row, because a CPU adds one number
    after the other."""
    squares = mx.square(array.astype(mx.float32)).sum(axis=-1).sum()
    return mx.sqrt(squares).astype(array.dtype)


def _ratio(above: mx.array, below: mx.array) -> mx.array:
    """Return the ratio of two norms; 1 if one is 0, so that a weight of zeros learns."""
    usable = (above > 0) & (below > 0)
    return mx.where(usable, above / mx.where(usable, below, 1), 1).astype(above.dtype)
