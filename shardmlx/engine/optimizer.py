"""mlx-lm's optimizers and learning-rate schedules, over the weights of one rank's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx_lm.tuner.utils import build_schedule

from shardmlx.config.checks import OPTIMIZERS
from shardmlx.engine.stage import Stage, layer_of
from shardmlx.errors import UserError


def build_optimizer(
    name: str,
    learning_rate: float,
    lr_schedule: Mapping[str, Any] | None,
    config: Mapping[str, Any],
) -> optim.Optimizer:
    """Build the optimizer that ``mlx_lm.lora`` would build from the same options.

    Raises ``UserError`` for options that make none.
    """
    try:
        rate = build_schedule(dict(lr_schedule)) if lr_schedule else learning_rate
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(
            f"lr_schedule {dict(lr_schedule or {})}: {error}; it needs a name out of "
            "mlx.optimizers.schedulers and its arguments"
        ) from None
    try:
        made: optim.Optimizer = getattr(optim, OPTIMIZERS[name].class_name)(
            learning_rate=rate, **config
        )
        return made
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer_config {name}: {error}") from None


class Updater:
    """The optimizer for all trained weights on this rank, shared ones counted once.

    Optimizers of MLX keep their state for each weight apart, so every rank's part of it is what
    one process would hold for the same weights.
    """

    def __init__(self, optimizer: optim.Optimizer, stages: Sequence[Stage]) -> None:
        self.optimizer = optimizer
        self._stages = stages

    def apply(self, scale: float = 1.0) -> None:
        """Update the weights with the gradients times ``scale``, and forget the gradients."""
        gradients: dict[str, mx.array] = {}
        weights: dict[str, mx.array] = {}
        for stage in self._stages:
            for name in stage.names:
                weight = stage.part[name]
                # Gradients of matrices come transposed; the optimizer reads them several times.
                gradient = mx.contiguous(stage.gradients[name])
                if scale != 1.0:
                    gradient = gradient * scale
                weights[name], gradients[name] = weight, gradient.astype(weight.dtype)
            stage.gradients.clear()
        # Also where nothing is trained: the learning rate that rank 0 reports moves here.
        updated = self.optimizer.apply_gradients(gradients, weights)
        # Drop the old weights before anything is evaluated, so that their memory is used again.
        gradients.clear()
        weights.clear()
        for stage in self._stages:
            for name in stage.names:
                stage.part[name] = updated[name]
        # Layer by layer: all at once, the temporaries of several weights would be there together.
        for _, layer in groupby(updated, layer_of):
            mx.eval([updated[name] for name in layer])
        mx.eval(self.optimizer.state)

    def state(self) -> dict[str, mx.array]:
        """Return the optimizer's state: a weight's as ``WEIGHT.KEY``, that of all as ``KEY``."""
        state: dict[str, mx.array] = {}
        for name, value in self.optimizer.state.items():
            if isinstance(value, dict):
                state.update({f"{name}.{key}": array for key, array in value.items()})
            else:
                state[name] = value
        return state

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Take what ``state`` returned, in whatever layout it was made."""
        tree: dict[str, Any] = {}
        for name, array in state.items():
            weight, _, key = name.rpartition(".")
            if weight:
                tree.setdefault(weight, {})[key] = array
            else:
                tree[key] = array
        self.optimizer.state = tree
