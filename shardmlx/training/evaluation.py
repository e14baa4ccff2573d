"""Evaluate a model in training on held-out data."""

from __future__ import annotations

import math

import numpy as np

from shardmlx.engine.batches import Batches
from shardmlx.training.batch_feed import BatchFeed, Share
from shardmlx.training.setup import TrainingRun


class Evaluation:
    """Losses of data sets, with the weights trained so far. Methods are collective.

    ``random`` draws the batches, also those of training: as in mlx-lm.
    """

    def __init__(self, job: TrainingRun, random: np.random.RandomState) -> None:
        self._job = job
        self._random = random

    def batches(self, name: str, *, loop: bool) -> Batches | None:
        """Return, on rank 0, the batches of a data set. Not collective."""
        if self._job.data is None:
            return None
        config = self._job.config
        return Batches(
            getattr(self._job.data, name),
            config.batch_size,
            config.max_seq_length,
            self._random,
            loop=loop,
        )

    def loss(self, name: str, num_batches: int, description: str) -> float | None:
        """Return, on rank 0, the mean loss of a token; None elsewhere, and if no token counts."""
        plan, config, transport = self._job.plan, self._job.config, self._job.transport
        available = self._job.sizes[name] // config.batch_size
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
