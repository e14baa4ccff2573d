"""From tokenised samples to the micro-batches of a replica; no MLX, no MPI.

Order, padding and truncation are those of mlx-lm's ``iterate_batches`` on one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PAD_TO = 32
"""Widths are one more than a multiple of this, as in mlx-lm."""

Sample = tuple[Sequence[int], int]
"""Token ids, and the position at which the loss starts to count."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rows of the global batch.

    ``tokens`` (rows, T + 1) int32, padded on the right; ``spans`` (rows, 2) the first and the last
    position that count, in positions of targets, which start at 1; ``first_row`` the place of the
    first row in the global batch.
    """

    tokens: np.ndarray
    spans: np.ndarray
    first_row: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, T) of the inputs."""
        rows, width = self.tokens.shape
        return rows, width - 1

    @property
    def valid_tokens(self) -> int:
        """How many targets count in the loss."""
        last = np.minimum(self.spans[:, 1], self.shape[1])
        return int(np.maximum(0, last - np.maximum(self.spans[:, 0], 1) + 1).sum())

    def rows(self, start: int, stop: int) -> MicroBatch:
        """Some of the rows, without the padding that none of them needs."""
        spans = self.spans[start:stop]
        width = min(_width(int(spans[:, 1].max())), self.tokens.shape[1])
        return MicroBatch(self.tokens[start:stop, :width], spans, self.first_row + start)


Batch = MicroBatch
"""A global batch is the micro-batch of all its rows."""


def _width(length: int) -> int:
    return 1 + PAD_TO * -(-length // PAD_TO)


def make_batch(samples: Sequence[Sample], max_seq_length: int) -> Batch:
    """Pad, and truncate, ``samples`` to one array."""
    lengths = [min(len(tokens), max_seq_length) for tokens, _ in samples]
    longest = max(len(tokens) for tokens, _ in samples)
    tokens = np.zeros((len(samples), min(_width(longest), max_seq_length)), np.int32)
    for row, ((ids, _), length) in enumerate(zip(samples, lengths, strict=True)):
        tokens[row, :length] = ids[:length]
    spans = np.array(
        [(start, length) for (_, start), length in zip(samples, lengths, strict=True)], np.int32
    )
    return Batch(tokens, spans, 0)


def iterate_batches(
    samples: Sequence[Sample],
    batch_size: int,
    max_seq_length: int,
    random: np.random.RandomState,
    *,
    loop: bool = False,
) -> Iterator[Batch]:
    """Global batches in mlx-lm's order, given a ``random`` in the state of its ``np.random``.

    Batches are fixed runs of samples, and their order is drawn anew in each epoch. What is left
    over at the end and fills no batch is not used.
    """
    starts = range(0, len(samples) - batch_size + 1, batch_size)
    while True:
        for i in random.permutation(len(starts)):
            yield make_batch(samples[starts[i] : starts[i] + batch_size], max_seq_length)
        if not loop:
            return


def split(batch: Batch, dp: int, replica: int, micro_batch_size: int) -> list[MicroBatch]:
    """The micro-batches of one replica; the last may have fewer rows than the others."""
    rows = len(batch.tokens) // dp
    start = replica * rows
    stop = start + rows
    return [
        batch.rows(i, min(i + micro_batch_size, stop)) for i in range(start, stop, micro_batch_size)
    ]
