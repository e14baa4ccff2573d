"""Data sets, read on rank 0 and tokenised as mlx-lm does, with errors that name file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.config.data import WantedData
from shardmlx.config.objective import SFT
from shardmlx.engine.batches import padded_width
from shardmlx.errors import UserError
from shardmlx.training.data_sources import RawSet, find_sets
from shardmlx.training.sample_set import NO_SAMPLES, SampleSet
from shardmlx.training.set_part import RowReading, SetPart

Progress = Callable[[str, Sequence[Any]], Iterator[Any]]
"""Iterates over a sequence and shows progress; the text names the sequence."""


@dataclass(frozen=True, slots=True)
class DataSets:
    """Samples; a set that the run does not need is empty."""

    train: SampleSet = field(default_factory=lambda: NO_SAMPLES)
    valid: SampleSet = field(default_factory=lambda: NO_SAMPLES)
    test: SampleSet = field(default_factory=lambda: NO_SAMPLES)
    warnings: tuple[str, ...] = ()

    def sizes(self) -> dict[str, int]:
        """Return the number of samples of each set, by name."""
        return {"train": len(self.train), "valid": len(self.valid), "test": len(self.test)}


def read_data(
    wanted: WantedData,
    tokenizer: TokenizerWrapper,
    max_positions: int | None,
    progress: Progress = lambda text, items: iter(items),
    *,
    vocabulary: int | None = None,
) -> DataSets:
    """Read the run's sets, and make tokens of so many rows as a plan needs, for a model's
    ``max_positions`` and ``vocabulary``. Raises ``UserError``, also for a set without a token that
    counts in the loss."""
    how = RowReading(wanted, tokenizer, max_positions, vocabulary)
    sets: dict[str, SampleSet] = {}
    found, warnings = find_sets(wanted)
    for name, raw in found.items():
        samples = _read_set(name, raw, how, progress, warnings)
        warnings += samples.news()
        if len(samples) < wanted.batch_size:
            raise UserError(
                f"{samples.name} has {len(samples)} samples, fewer than --batch-size "
                f"{wanted.batch_size}",
                "lower the batch size or add data",
            )
        sets[name] = samples
    return DataSets(**sets, warnings=tuple(warnings))


def _read_set(
    name: str, raw: Sequence[RawSet], how: RowReading, progress: Progress, warnings: list[str]
) -> SampleSet:
    """Return a set of one part, or of several, mixed by their weights; add to the ``warnings``."""
    parts = []
    places = []
    for number, each in enumerate(raw):
        part = SetPart(each, how)
        part.read(progress(f"reading {name}", range(len(each.rows))))
        part.look_around()
        warnings += part.news()
        rows = np.flatnonzero(~part.is_lost)
        if how.wanted.objective == SFT and not each.adds_nulls:  # a column is a key of all rows
            # mlx-lm cuts rows into batches by the number of their keys, which it takes for their
            # length.
            rows = np.argsort(part.columns, kind="stable")
        weight = each.weight if name == "train" else 1
        chosen = _weighted(rows, weight)
        answers = (chosen[:, None] * part.together + np.arange(part.together)).ravel()
        places.append(np.stack([np.full(len(answers), number), answers], axis=1))
        parts.append(part)
    return SampleSet.of(parts, np.concatenate(places), knows=how.wanted.objective != SFT)


def _weighted(rows: np.ndarray, weight: float) -> np.ndarray:
    """Return ``weight`` times as many rows, evenly repeated or left out."""
    count = max(1, round(weight * len(rows)))
    chosen: np.ndarray = rows[np.arange(count) * len(rows) // count]
    return chosen


def in_one(sets: Sequence[DataSets]) -> DataSets:
    """Return the samples of all sets in one, for what does not ask what is known of them."""
    return DataSets(
        train=SampleSet.joined([each.train for each in sets]),
        valid=SampleSet.joined([each.valid for each in sets]),
        test=SampleSet.joined([each.test for each in sets]),
    )


def longest_input(lengths: np.ndarray, max_seq_length: int) -> int:
    """Return T of the longest micro-batch that samples of these lengths can make."""
    return min(padded_width(int(lengths.max())), max_seq_length) - 1


def mean_lengths(
    lengths: np.ndarray,
    counted: np.ndarray,
    batch_size: int,
    max_seq_length: int,
    widths: Sequence[int] = (),
) -> tuple[int, int, float]:
    """Return mean lengths, padded as single rows and not, and the latter's share in the loss, of
    samples of these ``lengths`` of which so many tokens are ``counted``."""
    used = max(1, len(lengths) // batch_size) * batch_size
    lengths = np.maximum(lengths[:used], 2)
    padded, exact = (
        np.minimum(each, max_seq_length) - 1 for each in (padded_width(lengths), lengths)
    )
    if widths:
        inputs = np.array(widths) - 1
        padded = inputs[np.searchsorted(inputs, padded)]
    share = counted[:used].sum() / exact.sum()
    return round(float(padded.mean())), round(float(exact.mean())), float(share)
