"""Compute losses on one rank: with gradients for an update, and without them on held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from shardmlx.engine.batches import BASELINE, REFERENCE, MicroBatch
from shardmlx.engine.engine import Results, Step
from shardmlx.training.nonfinite import nonfinite_gradient, nonfinite_loss
from shardmlx.training.rows import Share
from shardmlx.training.scores import scores_of
from shardmlx.training.setup import TrainingRun


@dataclass(slots=True)
class Gradients:
    """The mean gradients of the steps since the last update. All ranks call its methods at the same
    time."""

    run: TrainingRun
    _loss_scale: float = 1.0
    """The factor of the losses of this update."""
    _shares: list[Share] = field(default_factory=list)
    _nonfinite_loss: str | None = None

    @property
    def counted_steps(self) -> int:
        """Number of steps of this update with a token that counts in the loss."""
        return sum(share.count > 0 for share in self._shares)

    @property
    def scale(self) -> float:
        """Factor from the stages' gradients to the mean gradient."""
        return 1 / max(1, self.counted_steps) / self._loss_scale

    def begin(self, step: int, share: Share, loss_scale: float) -> Step:
        """Return the engine's part of one step, which is to be made before ``add``. The loss scale
        of all steps of an update is the same."""
        self._loss_scale = loss_scale
        set_baselines(self.run, [share])
        self._shares.append(share)
        return Step(
            self.run.engine,
            share.microbatches,
            scale=loss_scale / max(1, share.count),
            key=(self.run.config.seed, step),
            reduce=step % self.run.config.batch.grad_accumulation_steps == 0,
        )

    def add(self, results: Results) -> list[float]:
        """Take in what the engine made of the step that was begun; return this rank's sums."""
        parts = self._shares[-1].microbatches
        objective = self.run.objective
        losses, sums = scores_of(results, parts, objective, self.run.training.workload.dtype)
        fault = nonfinite_loss(losses, self._where)
        self._nonfinite_loss = self._nonfinite_loss or fault
        return sums

    def finish(self) -> float:
        """Return the norm of the mean gradient of all weights after the last step of an update: the
        same on all ranks, so that all skip the same updates."""
        return self.scale * self.run.engine.gradient_norm(self._nonfinite_loss is not None)

    def cause(self) -> tuple[str | None, bool]:
        """Return why the norm is not finite, as far as this rank knows, and whether a loss shows
        it: that is the closer cause."""
        if self._nonfinite_loss is not None:
            return self._nonfinite_loss, True
        return nonfinite_gradient(self.run.stages, self._where), False

    @property
    def _where(self) -> str:
        transport = self.run.transport
        return transport.name(transport.rank)

    def used(self) -> None:
        """Begin the next update after this one was made."""
        self._shares.clear()
        self._nonfinite_loss = None

    def forget(self) -> None:
        """Begin the next update without making this one."""
        self.run.engine.forget_gradients()
        self.used()


@contextmanager
def evaluating(run: TrainingRun) -> Iterator[None]:
    """Compute without dropout in this context."""
    parts = [stage.part for stage in run.stages if stage.part.training]
    for part in parts:
        part.train(False)
    yield
    for part in parts:
        part.train(True)


def answers_of(
    run: TrainingRun, shares: Sequence[Sequence[MicroBatch]]
) -> Iterator[tuple[int, MicroBatch, np.ndarray]]:
    """Yield the log-probabilities of the answers of each micro-batch, with the number of its share,
    on ranks of the last stage. Collective."""
    parts = [(i, each) for i, share in enumerate(shares) for each in share]
    for j, logps in run.engine.evaluate([each for _, each in parts]).items():
        yield *parts[j], logps


def set_baselines(run: TrainingRun, shares: list[Share]) -> None:
    """Set KTO's reference points in the shares, one for each batch: what training has added to the
    likelihood of answers that belong to other prompts. Collective."""
    if run.objective is None or not run.objective.swaps:
        return
    gains = np.zeros(len(shares))
    with evaluating(run):
        for i, part, logps in answers_of(run, [share.swapped for share in shares]):
            gains[i] += (logps - part.known_of(REFERENCE)).sum()
    means = np.sum(run.transport.all_gather(gains, "KTO's reference point"), axis=0)
    for share, mean in zip(shares, means, strict=True):
        for part in share.microbatches:
            assert part.known is not None, "an objective knows its rows"
            part.known[:, BASELINE] = max(0.0, mean / share.count)
