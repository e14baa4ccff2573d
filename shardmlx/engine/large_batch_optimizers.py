"""LARS and LAMB: optimizers for batches of thousands of rows, which MLX lacks.

They scale the step of each weight by its norm, so that no layer moves by more than a share of
itself, however large the learning rate. Batches are global: more replicas need neither of the two;
a larger ``--batch-size`` may.

Arrays of one dimension (gains of norms, biases, DoRA's magnitudes) are exempt from the scale and
from weight decay, as in the experiments of both papers. A weight of zeros, such as LoRA's second
matrix before its first step, is not scaled: it would never move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from shardmlx.models.runtime.slice import Slice, Sum

Rate = float | Callable[[mx.array], mx.array]


class LayerwiseOptimizer(optim.Optimizer):
    """An optimizer of a flat mapping of weights that needs norms of each matrix, also where other
    ranks have the rest of it."""

    def __init__(self, learning_rate: Rate) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self._sums: dict[str, Sum] = {}
        self._matrices: Iterator[str] = iter(())

    def share(self, parts: Sequence[Slice]) -> None:
        """Norm the weights of these slices whole, of which other ranks have pieces: their group
        sums the squares, in the graph of the update."""
        for part in parts:
            if part.all_sum is not None:
                self._sums |= dict.fromkeys(part.pieces, part.all_sum)

    def sums(self, name: str) -> bool:
        """Return whether ranks sum the norms of a weight."""
        return name in self._sums

    def apply_gradients(
        self, gradients: Mapping[str, mx.array], parameters: Mapping[str, mx.array]
    ) -> Any:
        """Return the updated weights by their names."""
        # MLX passes over them in this order, and does not say their names.
        self._matrices = iter([name for name, each in gradients.items() if each.ndim > 1])
        return super().apply_gradients(gradients, parameters)

    def norms(self, *arrays: mx.array) -> mx.array:
        """Return the Euclidean norms, in float32, of arrays like the next matrix.

        Row by row: MLX on a CPU adds numbers one by one, which loses digits of a large matrix.
        """
        all_sum = self._sums.get(next(self._matrices))
        squares = mx.stack([mx.square(each.astype(mx.float32)).sum(-1).sum() for each in arrays])
        return mx.sqrt(squares if all_sum is None else all_sum(squares))


class LARS(LayerwiseOptimizer):
    """SGD with momentum, in which each weight's gradient is scaled to ``trust_coefficient`` of the
    weight's norm (You et al., arXiv:1708.03888, algorithm 1)."""

    def __init__(
        self,
        learning_rate: Rate,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 0.001,
    ) -> None:
        super().__init__(learning_rate)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.trust_coefficient = trust_coefficient

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Make the momentum of a weight."""
        state["v"] = mx.zeros_like(parameter)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        """Return an updated weight."""
        rate = self.learning_rate
        if parameter.ndim > 1:
            weight, size = self.norms(parameter, gradient)
            ratio = self.trust_coefficient * weight / (size + self.weight_decay * weight)
            rate = rate * mx.where((weight > 0) & (size > 0), ratio, 1)
            gradient = gradient + self.weight_decay * parameter
        step: mx.array = self.momentum * state["v"] + rate.astype(gradient.dtype) * gradient
        state["v"] = step
        return parameter - step


class LAMB(LayerwiseOptimizer):
    """Adam with decoupled decay, in which each weight's step has the norm of the weight, times the
    learning rate (You et al., arXiv:1904.00962, algorithm 2, whose function of the norm is the
    identity)."""

    def __init__(
        self,
        learning_rate: Rate,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(learning_rate)
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
        state["m"] = b1 * state["m"] + (1 - b1) * gradient
        state["v"] = b2 * state["v"] + (1 - b2) * mx.square(gradient)
        mean = state["m"] / (1 - b1**self.step).astype(gradient.dtype)
        square = state["v"] / (1 - b2**self.step).astype(gradient.dtype)
        step = mean / (mx.sqrt(square) + self.eps)
        rate = self.learning_rate
        if parameter.ndim > 1:
            step = step + self.weight_decay * parameter
            weight, size = self.norms(parameter, step)
            rate = rate * mx.where((weight > 0) & (size > 0), weight / size, 1)
        updated: mx.array = parameter - rate.astype(gradient.dtype) * step
        return updated
