"""Evaluate data sets without gradients: rank 0's part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from shardmlx.distributed.crew import Crew
from shardmlx.engine.batches import Batch, Batches
from shardmlx.planning.memory.limits import would_take
from shardmlx.training.rows import Rows, rows_of_ranks
from shardmlx.training.run_worker import RunWorker
from shardmlx.training.sample_set import RowError, SampleSet
from shardmlx.training.scores import means_of


class StopRequested(Exception):
    """A signal asks the run to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


Evaluated = tuple[float, Mapping[str, float]]
"""The mean loss of a data set, and what preferences say of it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses of a run's data sets. ``random`` draws batches, as in mlx-lm."""

    crew: Crew[RunWorker]
    random: np.random.RandomState
    _longest: dict[str, int] = field(default_factory=dict)
    """The longest input of each set that was judged, where it is longer than planned."""

    def batches(self, name: str, *, loop: bool) -> Batches:
        """Return the batches of a data set."""
        run = self.crew.worker.run
        assert run.data is not None, "rank 0 has the data"
        samples = getattr(run.data, name)
        batch = run.training.way.batch
        objective = run.objective
        config = run.config
        most = {"valid": config.val_batches, "test": config.test_batches}.get(name, -1)
        # The starting model judges a data set's batches once, so they stay the same.
        is_limited = objective is not None and objective.facts.has_reference and most != -1
        return Batches(
            samples,
            batch.batch_size,
            batch.max_seq_length,
            self.random,
            loop=loop,
            widths=run.training.plan.widths,
            swaps=objective is not None and objective.swaps,
            most=most if is_limited else None,
        )

    def draw(self, name: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches of a data set, and say what was found out of their rows. Raises
        ``RowError`` for a row that cannot be used, or for whose length memory lacks."""
        run = self.crew.worker.run
        assert run.data is not None, "rank 0 has the data"
        samples: SampleSet = getattr(run.data, name)
        for batch in batches:
            for text in samples.news():
                run.reporter.warn(text)
            self._check_length(name, batch.shape[1])
            yield batch

    def _check_length(self, name: str, length: int) -> None:
        """Raise ``RowError`` if a batch, of which no row was known when the run was planned, takes
        more memory than there is."""
        run = self.crew.worker.run
        of_step, forward = run.training.lengths.longest
        is_step = name == "train"
        known = of_step if is_step else max(of_step, forward)
        if length <= max(known, self._longest.get(name, 0)):
            return
        self._longest[name] = length
        found = (length, forward) if is_step else (of_step, length)
        peaks = run.training.memory(run.job.cluster, found)
        for rank, (memory, limits) in enumerate(zip(peaks, run.job.limits, strict=True)):
            if memory.peak > limits.memory:
                raise RowError(
                    f"{would_take(rank, limits.budget, memory.peak)} for a sequence of the {name} "
                    f"set with {length + 1} tokens, padded, where the longest that was looked at "
                    f"has {known + 1}",
                    f"give --max-seq-length {known + 1}, or take the row out",
                )
        run.reporter.warn(
            f"a sequence of the {name} set is longer than those that were looked at: {length + 1} "
            f"tokens, padded, and not {known + 1}; it fits in memory"
        )

    def loss(self, name: str, num_batches: int, description: str) -> Evaluated | None:
        """Return the mean loss of a token, or pair, and what preferences say; None for a set
        without a batch, or without a token that counts. Raises ``StopRequested``."""
        run = self.crew.worker.run
        assert run.data is not None, "rank 0 has the data"
        available = run.data.sizes()[name] // run.training.way.batch.batch_size
        remaining = available if num_batches == -1 else min(num_batches, available)
        if not remaining:
            return None
        batches = islice(self.draw(name, self.batches(name, loop=False)), remaining)
        pending = []
        with run.reporter.bar(description, remaining) as bar:
            for rows in self.groups(batches):
                args = [(of_rank, description) for of_rank in rows]
                pending.append(self.crew.begin_each(RunWorker.evaluate, args))
                bar.advance(len(rows[0]))
        answers = [each.values() for each in pending]
        count = sum(of_ranks[0][1] for of_ranks in answers)
        if not count:
            run.reporter.warn(f"{description}: no token of these batches counts: no loss")
            return None
        totals = [
            np.sum([sums for sums, _ in of_rank], axis=0) for of_rank in zip(*answers, strict=True)
        ]
        loss = float(sum(total[0] for total in totals)) / count
        return loss, means_of(totals, run.objective)

    def groups(self, batches: Iterable[Batch]) -> Iterator[list[list[Rows]]]:
        """Yield the rows of as many batches at once as keep all stages busy, for each rank. Raises
        ``StopRequested`` between two."""
        run = self.crew.worker.run
        transport = self.crew.transport
        plan = run.training.plan
        microbatches = -(-plan.microbatches // 2) if run.shares_prompts else plan.microbatches
        at_once = -(-4 * plan.mesh.pp // microbatches)
        source = iter(batches)
        while group := list(islice(source, at_once)):
            number = transport.stop_requested()
            if number is not None:
                raise StopRequested(number)
            of_batches = [rows_of_ranks(plan, batch) for batch in group]
            yield _of_ranks(of_batches)


def _of_ranks(of_batches: list[list[Rows]]) -> list[list[Rows]]:
    """Return the rows of several batches by rank; those of ranks of one replica are one object."""
    found: dict[tuple[int, ...], list[Rows]] = {}
    of_ranks = []
    for rows in zip(*of_batches, strict=True):
        of_ranks.append(found.setdefault(tuple(map(id, rows)), list(rows)))
    return of_ranks
