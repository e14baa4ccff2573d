"""Compute losses: with gradients for an update, and without them on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from shardmlx.engine.batches import BASELINE, REFERENCE, Batch, Batches, MicroBatch
from shardmlx.engine.engine import Results, Step
from shardmlx.training.batch_feed import BatchFeed, Share
from shardmlx.training.scores import means_of, scores_of
from shardmlx.training.setup import TrainingRun
from shardmlx.training.soundness import nonfinite_gradient, nonfinite_loss

T = TypeVar("T")


@dataclass(slots=True)
class Gradients:
    """The mean gradients of the steps since the last update. Methods are collective."""

    job: TrainingRun
    norm: float = 0.0
    """The norm of the mean gradient of all weights, once the update is complete."""
    _shares: list[Share] = field(default_factory=list)
    _nonfinite_loss: str | None = None

    @property
    def counted_steps(self) -> int:
        """Number of steps of this update with a token that counts in the loss."""
        return sum(share.count > 0 for share in self._shares)

    @property
    def scale(self) -> float:
        """Factor from the stages' gradients to the mean gradient."""
        return 1 / max(1, self.counted_steps)

    def begin(self, step: int, share: Share) -> Step:
        """Return the engine's part of one step, which is to be made before ``add``."""
        _set_baselines(self.job, [share])
        self._shares.append(share)
        return Step(
            self.job.engine,
            share.microbatches,
            scale=1 / max(1, share.count),
            key=(self.job.planned.config.seed, step),
            reduce=step % self.job.planned.config.grad_accumulation_steps == 0,
        )

    def add(self, results: Results) -> list[float]:
        """Take in what the engine made of the step that was begun; return this rank's sums."""
        parts, objective = self._shares[-1].microbatches, self.job.planned.objective
        losses, sums = scores_of(results, parts, objective)
        fault = nonfinite_loss(losses, self.job.transport)
        self._nonfinite_loss = self._nonfinite_loss or fault
        return sums

    def finish(self) -> str | None:
        """Set ``norm`` after the last step; if it is not finite, return the cause."""
        # Compute the norm on all ranks, so that all skip the same updates.
        self.norm = self.scale * self.job.engine.gradient_norm(self._nonfinite_loss is not None)
        if math.isfinite(self.norm):
            return None
        mine = nonfinite_gradient(self.job.stages, self.job.transport)
        pair = (self._nonfinite_loss, mine)
        found: list[Any] = self.job.transport.all_gather(pair, "NaN")
        # A loss is the closer cause.
        causes = [cause for each in zip(*found, strict=True) for cause in each if cause]
        return causes[0] if causes else "the norm of the gradient is not finite"

    def used(self) -> None:
        """Begin the next update after this one was made."""
        self._shares.clear()
        self._nonfinite_loss = None

    def forget(self) -> None:
        """Begin the next update without making this one."""
        self.job.engine.forget_gradients()
        self.used()


Evaluated = tuple[float, Mapping[str, float]]
"""The mean loss of a data set, and what preferences say of it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses of data sets; all methods are collective. ``random`` draws batches, as in mlx-lm."""

    job: TrainingRun
    random: np.random.RandomState

    def batches(self, name: str, *, loop: bool) -> Batches | None:
        """Return, on rank 0, the batches of a data set. Not collective."""
        data = self.job.data
        if data is None:
            return None
        samples, batch = getattr(data, name), self.job.planned.way.batch
        objective, config = self.job.planned.objective, self.job.planned.config
        most = {"valid": config.val_batches, "test": config.test_batches}.get(name, -1)
        # The starting model judges a data set's batches once, so they stay the same.
        is_limited = objective is not None and objective.facts.has_reference and most != -1
        return Batches(
            samples,
            batch.batch_size,
            batch.max_seq_length,
            self.random,
            loop=loop,
            widths=self.job.planned.plan.widths,
            swaps=objective is not None and objective.swaps,
            most=most if is_limited else None,
        )

    def loss(self, name: str, num_batches: int, description: str) -> Evaluated | None:
        """Return, on rank 0, the mean loss of a token, or pair, and what preferences say; None
        elsewhere, and if no token counts."""
        planned, transport = self.job.planned, self.job.transport
        available = planned.sizes[name] // planned.way.batch.batch_size
        remaining = available if num_batches == -1 else min(num_batches, available)
        if not remaining:
            return None
        objective = self.job.planned.objective

        def judge(shares: list[Share]) -> tuple[list[float], int]:
            _set_baselines(self.job, shares)
            parts = [each for share in shares for each in share.microbatches]
            _, sums = scores_of(self.job.engine.evaluate(parts), parts, objective)
            return sums, sum(share.count for share in shares)

        batches = self.batches(name, loop=False)
        found = evaluate_batches(self.job, batches, remaining, description, judge)
        totals, counts = zip(*found, strict=True)
        count = sum(counts)
        gathered = transport.gather(np.sum(totals, axis=0), what=description)
        if not count:
            self.job.reporter.warn(f"{description}: no token of these batches counts: no loss")
        if gathered is None or not count:
            return None
        loss = float(sum(total[0] for total in gathered)) / count
        return loss, means_of(gathered, objective)

    def is_finite(self, share: Share) -> bool:
        """Return, on all ranks, whether all of them find finite losses of a batch."""
        with evaluating(self.job):
            results = self.job.engine.evaluate(share.microbatches)
        is_finite = all(np.isfinite(each).all() for each in results.values())
        return all(self.job.transport.all_gather(is_finite, "trying the weights"))


@contextmanager
def evaluating(job: TrainingRun) -> Iterator[None]:
    """Compute without dropout in this context."""
    parts = [stage.part for stage in job.stages if stage.part.training]
    for part in parts:
        part.train(False)
    yield
    for part in parts:
        part.train(True)


def evaluate_batches(
    job: TrainingRun,
    batches: Iterator[Batch] | None,
    count: int,
    description: str,
    evaluate: Callable[[list[Share]], T],
) -> list[T]:
    """Return what ``evaluate`` says of the shares of so many batches, which are on rank 0; several
    at once keep all stages busy. Collective."""
    plan, found = job.planned.plan, []
    microbatches = -(-plan.microbatches // 2) if job.shares_prompts else plan.microbatches
    at_once = -(-4 * plan.mesh.pp // microbatches)
    feed = BatchFeed(
        plan, job.transport, batches, count, job.number, shares_prompts=job.shares_prompts
    )
    job.transport.activity.begin(description)
    with evaluating(job), job.reporter.bar(description, count) as bar, feed:
        while shares := feed.take(at_once):
            feed.send_ahead(at_once)
            found.append(evaluate(shares))
            bar.advance(len(shares))
    return found


def answers_of(
    job: TrainingRun, shares: Sequence[Sequence[MicroBatch]]
) -> Iterator[tuple[int, MicroBatch, np.ndarray]]:
    """Yield the log-probabilities of the answers of each micro-batch, with the number of its share,
    on ranks of the last stage. Collective."""
    parts = [(i, each) for i, share in enumerate(shares) for each in share]
    for j, logps in job.engine.evaluate([each for _, each in parts]).items():
        yield *parts[j], logps


def _set_baselines(job: TrainingRun, shares: list[Share]) -> None:
    """Set KTO's reference points in the shares, one for each batch: what training has added to the
    likelihood of answers that belong to other prompts. Collective."""
    if job.planned.objective is None or not job.planned.objective.swaps:
        return
    gains = np.zeros(len(shares))
    with evaluating(job):
        for i, part, logps in answers_of(job, [share.swapped for share in shares]):
            gains[i] += (logps - part.known_of(REFERENCE)).sum()
    means = np.sum(job.transport.all_gather(gains, "KTO's reference point"), axis=0)
    for share, mean in zip(shares, means, strict=True):
        for part in share.microbatches:
            assert part.known is not None, "an objective knows its rows"
            part.known[:, BASELINE] = max(0.0, mean / share.count)
