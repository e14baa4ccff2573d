"""Compute the gradients of an update: the mean over the steps since the one before."""

from __future__ import annotations

import math
from typing import Any

from shardmlx.engine.loss_scale import LossScale
from shardmlx.training.batch_feed import Share
from shardmlx.training.setup import TrainingRun
from shardmlx.training.soundness import nonfinite_gradient, nonfinite_loss


class Gradients:
    """The gradients of one update, on all ranks of a run. Methods are collective.

    The loss is scaled as ``--loss-scale`` says. If a gradient overflows, the whole update is
    computed again with half the factor, so that no batch is lost. Factors are powers of two: the
    gradients equal those of a run that began with the lower one, except for float16's smallest
    numbers, and for the int8 rounding errors of earlier sums, which are lost.
    """

    def __init__(self, job: TrainingRun) -> None:
        self._config = job.config
        self._engine = job.engine
        self._stages = job.stages
        self._transport = job.transport
        self._reporter = job.reporter
        self._loss_scale = LossScale.of(job.config.loss_scale, job.workload.dtype)
        self._steps: list[tuple[int, Share]] = []
        self._nonfinite_loss: str | None = None
        self.norm = 0.0
        """The norm of the mean gradient of all weights, once the update is complete."""

    @property
    def counted_steps(self) -> int:
        """Number of steps of this update with a token that counts in the loss."""
        return sum(share.valid_tokens > 0 for _, share in self._steps)

    @property
    def scale(self) -> float:
        """Factor from the stages' gradients to the mean gradient."""
        return 1 / max(1, self.counted_steps) / self._loss_scale.factor

    def add(self, step: int, share: Share) -> dict[int, float]:
        """Compute the gradients of one step, and return its losses as ``Engine.train_step``
        does."""
        self._steps.append((step, share))
        losses = self._compute(step, share)
        self._nonfinite_loss = self._nonfinite_loss or nonfinite_loss(losses, self._transport)
        return losses

    def finish(self, step: int) -> str | None:
        """Set ``norm`` after the last step; if it is not finite, return the cause."""
        before = self._loss_scale.state()
        self._find_norm()
        while not math.isfinite(self.norm):
            is_loss, what = self._fault()
            if is_loss or not self._loss_scale.overflowed():
                # No factor would help, so the earlier one stays.
                self._loss_scale.restore(before)
                return what
            factor = self._loss_scale.factor
            self._reporter.say(f"step {step}: {what}: again, with the loss scaled by {factor:g}")
            self._engine.forget_gradients()
            for each in self._steps:
                self._compute(*each)
            self._find_norm()
        return None

    def used(self) -> None:
        """Begin the next update after this one was made."""
        factor = self._loss_scale.factor
        self._loss_scale.updated()
        self._rescale_from(factor)
        self._begin()

    def forget(self) -> None:
        """Begin the next update without making this one."""
        self._engine.forget_gradients()
        self._begin()

    def state(self) -> list[float]:
        """Return the state for a checkpoint: the loss scale."""
        return self._loss_scale.state()

    def restore(self, state: list[float]) -> None:
        """Restore ``state``."""
        self._loss_scale.restore(state)
        self._rescale_from(state[0])

    def _compute(self, step: int, share: Share) -> dict[int, float]:
        return self._engine.train_step(
            share.microbatches,
            scale=self._loss_scale.factor / max(1, share.valid_tokens),
            key=(self._config.seed, step),
            reduce=step % self._config.grad_accumulation_steps == 0,
        )

    def _find_norm(self) -> None:
        # Compute the norm on all ranks, so that all skip the same updates.
        norm = self._engine.gradient_norm(self._nonfinite_loss is not None)
        self.norm = self.scale * norm

    def _fault(self) -> tuple[bool, str]:
        """Return whether a loss is not finite, as the closer cause, and the fault's name."""
        mine = nonfinite_gradient(self._stages, self._transport)
        pair = (self._nonfinite_loss, mine)
        found: list[Any] = self._transport.all_gather(pair, "NaN")
        losses, gradients = (list(filter(None, each)) for each in zip(*found, strict=True))
        if losses:
            return True, losses[0]
        return False, gradients[0] if gradients else "the norm of the gradient is not finite"

    def _rescale_from(self, factor: float) -> None:
        """Scale the rounding errors of gradients with another loss scale to the present one."""
        if self._loss_scale.factor != factor:
            self._engine.reducer.errors.scale(self._loss_scale.factor / factor)

    def _begin(self) -> None:
        self._steps.clear()
        self._nonfinite_loss = None
