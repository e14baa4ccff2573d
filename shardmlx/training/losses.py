"""Compute losses: with gradients for an update, and without them on held-out data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardmlx.engine.batches import Batches
from shardmlx.engine.optimizer import LossScale
from shardmlx.training.batch_feed import BatchFeed, Share
from shardmlx.training.setup import TrainingRun
from shardmlx.training.soundness import nonfinite_gradient, nonfinite_loss


class Gradients:
    """The mean gradients of the steps since the last update. Methods are collective.

    If a gradient overflows, the whole update is computed again with half the factor of the loss, so
    that no batch is lost. Factors are powers of two: the gradients equal those of a run that began
    with the lower one, except for float16's smallest numbers, and for the int8 rounding errors of
    earlier sums, which are lost.
    """

    def __init__(self, job: TrainingRun) -> None:
        self._options = job.planned.steps
        self._engine = job.engine
        self._stages = job.stages
        self._transport = job.transport
        self._reporter = job.reporter
        self._loss_scale = LossScale.of(self._options.loss_scale, job.planned.workload.dtype)
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
        """Compute the gradients of one step; return its losses like ``Engine.train_step``."""
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
        self._loss_scale.restore(state)
        self._rescale_from(state[0])

    def _compute(self, step: int, share: Share) -> dict[int, float]:
        return self._engine.train_step(
            share.microbatches,
            scale=self._loss_scale.factor / max(1, share.valid_tokens),
            key=(self._options.seed, step),
            reduce=step % self._options.grad_accumulation_steps == 0,
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


class Evaluation:
    """Losses of data sets; all methods are collective. ``random`` draws batches, as in mlx-lm."""

    def __init__(self, job: TrainingRun, random: np.random.RandomState) -> None:
        self._job = job
        self._random = random

    def batches(self, name: str, *, loop: bool) -> Batches | None:
        """Return, on rank 0, the batches of a data set. Not collective."""
        data = self._job.planned.data
        if data is None:
            return None
        samples, batch = getattr(data, name), self._job.planned.way.batch
        return Batches(
            samples,
            batch.batch_size,
            batch.max_seq_length,
            self._random,
            loop=loop,
            widths=self._job.planned.plan.widths,
        )

    def loss(self, name: str, num_batches: int, description: str) -> float | None:
        """Return, on rank 0, the mean loss of a token; None elsewhere, and if no token counts."""
        planned, transport = self._job.planned, self._job.transport
        plan = planned.plan
        available = planned.sizes[name] // planned.way.batch.batch_size
        remaining = available if num_batches == -1 else min(num_batches, available)
        if not remaining:
            return None
        # Several batches at once keep all stages busy.
        at_once = -(-4 * plan.mesh.pp // plan.microbatches)
        feed = BatchFeed(plan, transport, self.batches(name, loop=False), remaining)
        total, tokens = 0.0, 0
        transport.activity.begin(description)
        self._set_training(False)
        with self._job.reporter.bar(description, remaining) as bar, feed:
            while shares := feed.take(at_once):
                feed.send_ahead(at_once)
                losses = self._job.engine.evaluate(
                    [microbatch for share in shares for microbatch in share.microbatches]
                )
                total += sum(losses.values())
                tokens += sum(share.valid_tokens for share in shares)
                bar.advance(len(shares))
        self._set_training(True)
        totals = transport.gather(total, what=description)
        if not tokens:
            self._job.reporter.warn(f"{description}: no token of these batches counts: no loss")
        return None if totals is None or not tokens else sum(totals) / tokens

    def is_finite(self, share: Share) -> bool:
        """Return, on all ranks, whether all of them find finite losses of a batch."""
        self._set_training(False)
        losses = self._job.engine.evaluate(share.microbatches)
        self._set_training(True)
        is_finite = all(map(math.isfinite, losses.values()))
        return all(self._job.transport.all_gather(is_finite, "trying the weights"))

    def _set_training(self, mode: bool) -> None:
        for stage in self._job.stages:
            stage.part.train(mode)
