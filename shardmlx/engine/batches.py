"""Make the micro-batches of a replica from tokenised samples. No MLX, no MPI.

Order, padding and truncation are those of mlx-lm's ``iterate_batches`` on one process; but the
position in the data can be saved and restored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import numpy as np

from shardmlx.engine.token_losses import TokenTerms
from shardmlx.models.runtime.packed_positions import PackedPositions

PAD_TO = 32
"""Padding: widths are one more than a multiple of this, as in mlx-lm."""

MOST_WIDTHS = 32
"""Number of widths of a run's micro-batches, at most. On a GPU each shape is a compiled graph whose
buffers MLX keeps, and Metal allows 499,000 in all (github.com/ml-explore/mlx/issues/4464)."""

Sample = tuple[Sequence[int] | np.ndarray, int]
"""Token ids, and the position at which the loss starts to count. A token after it that does not
count is stored as ``~token``, which is negative."""

WANTED, REFERENCE, SWAPPED, BASELINE = range(4)
"""Columns of what an objective of preferences knows of a row: 1 if its answer is wanted and 0 if
not; the answer's log-probability as the run started, and that of the answer of the row before, in
its place; and KTO's reference point of the batch."""

KNOWN = 4
"""Number of these columns."""


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """Return the ids of tokens, also of those that do not count."""
    ids: np.ndarray = np.maximum(tokens, ~tokens)
    return ids


class SampleSource(Sequence[Sample]):
    """Samples of which some are made when they are asked for."""

    def prepare(self, start: int, stop: int) -> None:
        """Begin to make the samples that are asked for next."""


def counted_in(tokens: Sequence[int], start: int, most: int) -> int:
    """Return how many of a sample's first ``most`` tokens count in the loss, from ``start`` on."""
    targets = tokens[max(start, 1) : most]
    if not targets or min(targets) >= 0:
        return len(targets)
    return sum(token >= 0 for token in targets)


@dataclass(frozen=True, slots=True, eq=False)
class Samples(Sequence[Sample]):
    """Samples in one array: 4 bytes a token, where Python's numbers take 36.

    ``tokens``, int32, are all samples' in a row; ``bounds`` (samples, 3), int64, are each sample's
    begin and end in ``tokens``, and the position at which its loss starts to count. ``known``
    (samples, KNOWN), float64, is what an objective of preferences knows; None without one.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    known: np.ndarray | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], known: np.ndarray | None = None) -> Samples:
        """Return samples in one array, and what is ``known`` of them."""
        ends = np.cumsum([len(tokens) for tokens, _ in samples], dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])
        bounds = np.stack([begins, ends, [start for _, start in samples]], axis=1)
        return cls(np.concatenate([np.asarray(tokens) for tokens, _ in samples]), bounds, known)

    def __len__(self) -> int:
        return len(self.bounds)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice | np.ndarray) -> Samples: ...
    def __getitem__(self, i: int | slice | np.ndarray) -> Sample | Samples:
        if isinstance(i, (slice, np.ndarray)):
            known = None if self.known is None else self.known[i]
            return Samples(self.tokens, self.bounds[i], known)
        begin, end, start = self.bounds[i].tolist()
        return self.tokens[begin:end], start


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A micro-batch: some rows of the global batch, each a sequence.

    ``tokens`` (rows, T + 1) int32 are padded on the right. ``spans``
    (rows, 2) are the first and the last target that count in the loss, but for negative ones;
    targets are numbered from 1. ``first_row`` is the number of the first row in the global batch.
    Some of the rows are padded to one of the ``widths``. With ``places`` the micro-batch is packed:
    one row, which holds only these positions, one after the other. ``known`` (rows, KNOWN) is what
    an objective of preferences knows of the rows; ``swapped``, of a global batch of KTO, are the
    same prompts with the answer of the row before. With ``terms`` the loss is one of tokens, whose
    targets are not the tokens after the inputs; the positions that count, row after row, are those
    of the terms.
    """

    tokens: np.ndarray
    spans: np.ndarray
    first_row: int
    places: PackedPositions | None = None
    widths: Sequence[int] = ()
    known: np.ndarray | None = None
    swapped: MicroBatch | None = None
    terms: TokenTerms | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (rows, T) of the inputs."""
        if self.places is not None:
            return 1, len(self.places.rows)
        rows, width = self.tokens.shape
        return rows, width - 1

    @property
    def inputs(self) -> np.ndarray:
        """Token ids of the inputs, (rows, T)."""
        if self.places is not None:
            return token_ids(self.tokens[None, *self.places])
        return token_ids(self.tokens[:, :-1])

    @property
    def targets(self) -> np.ndarray:
        """Token after each of the inputs, (rows, T)."""
        return token_ids(self._marked_targets)

    @property
    def _marked_targets(self) -> np.ndarray:
        if self.places is not None:
            rows, positions = self.places
            return self.tokens[None, rows, positions + 1]
        return self.tokens[:, 1:]

    @property
    def counts(self) -> np.ndarray:
        """True for each target that counts in the loss, (rows, T)."""
        if self.places is None:
            numbers = np.arange(1, self.shape[1] + 1)
            spans = self.spans[:, None]
        else:
            numbers = self.places.positions + 1
            spans = self.spans[None, self.places.rows]
        counts: np.ndarray = (numbers >= spans[..., 0]) & (numbers <= spans[..., 1])
        counts &= self._marked_targets >= 0
        return counts

    @property
    def row_numbers(self) -> np.ndarray:
        """Numbers of the rows that it holds, ascending: a packed one lacks some of ``tokens``."""
        return np.arange(len(self.tokens)) if self.places is None else np.unique(self.places.rows)

    def known_of(self, column: int) -> np.ndarray:
        """Return what an objective of preferences knows of the rows that it holds."""
        assert self.known is not None, "an objective knows its rows"
        values: np.ndarray = self.known[self.row_numbers, column]
        return values

    @property
    def answer_of(self) -> np.ndarray:
        """Index in ``row_numbers`` of the row of each position, (rows, T)."""
        if self.places is None:
            return np.broadcast_to(np.arange(len(self.tokens))[:, None], self.shape)
        return np.searchsorted(self.row_numbers, self.places.rows)[None]

    @property
    def valid_tokens(self) -> int:
        """Number of targets that count in the loss."""
        return int(self.counts.sum())

    def rows(self, start: int, stop: int) -> MicroBatch:
        """Return some of the rows, without the padding that none of them needs."""
        spans = self.spans[start:stop]
        width = _width_of(int(spans[:, 1].max()), self.widths)
        return replace(
            self,
            tokens=self.tokens[start:stop, :width],
            spans=spans,
            first_row=self.first_row + start,
            known=None if self.known is None else self.known[start:stop],
            swapped=None,
        )


Batch = MicroBatch
"""Global batch: the micro-batch of all its rows."""


IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


def padded_width(length: IntOrArray) -> IntOrArray:
    """Return the padded width, as in mlx-lm, of rows whose longest has ``length`` tokens."""
    return 1 + PAD_TO * -(-length // PAD_TO)


def few_widths(lengths: np.ndarray, max_seq_length: int) -> tuple[int, ...]:
    """Return the widths for rows of these lengths; none if their multiples are few enough.

    The multiples that occur are given up one after the other: each time the one whose rows take the
    fewest tokens more in the next.
    """
    widths, rows = np.unique(np.minimum(padded_width(lengths), max_seq_length), return_counts=True)
    if len(widths) <= MOST_WIDTHS:
        return ()
    while len(widths) > MOST_WIDTHS:
        least = int((rows[:-1] * np.diff(widths)).argmin())
        rows[least + 1] += rows[least]
        widths = np.delete(widths, least)
        rows = np.delete(rows, least)
    return tuple(widths.tolist())


def _width_of(length: int, widths: Sequence[int]) -> int:
    """Return the first of ``widths`` with room for a padded row, else the row's multiple."""
    multiple = padded_width(length)
    return next((width for width in widths if width >= multiple), multiple)


def make_batch(samples: Sequence[Sample], max_seq_length: int, widths: Sequence[int] = ()) -> Batch:
    """Pad and truncate ``samples`` to one batch. One token of the padding counts, as in mlx-lm, but
    not in an answer whose log-probability is of interest."""
    lengths = [min(len(tokens), max_seq_length) for tokens, _ in samples]
    longest = max(len(tokens) for tokens, _ in samples)
    width = min(_width_of(longest, widths), max_seq_length)
    tokens = np.zeros((len(samples), width), np.int32)
    for row, ((ids, _), length) in enumerate(zip(samples, lengths, strict=True)):
        tokens[row, :length] = ids[:length]
    # A row without a token to learn does not count its padding either, nor one whose end does not
    # count.
    spans = np.array(
        [
            (
                start if length > max(start, 1) else max(start, length + 1),
                length - (ids[length - 1] < 0),
            )
            for (ids, start), length in zip(samples, lengths, strict=True)
        ],
        np.int32,
    )
    known = samples.known if isinstance(samples, Samples) else None
    if known is not None:
        spans[:, 1] = np.array(lengths) - 1
    return Batch(tokens, spans, 0, widths=widths, known=known)


@dataclass(eq=False)
class Batches(Iterator[Batch]):
    """Global batches in mlx-lm's order, given a ``random`` in the state of its ``np.random``.

    Each batch is a fixed run of samples. Each epoch draws the order of batches anew when its first
    batch is asked for, from a state that others may draw from too. Samples at the end that fill no
    batch are not used. With ``loop`` epochs repeat. With ``swaps`` batches have ``swapped`` ones.
    With ``most`` the data set is only so many batches, evenly spread.
    """

    samples: Sequence[Sample]
    batch_size: int
    max_seq_length: int
    random: np.random.RandomState
    loop: bool = False
    widths: Sequence[int] = ()
    swaps: bool = False
    most: int | None = None
    _drawn_from: dict[str, Any] = field(default_factory=dict)
    _order: Sequence[int] = ()
    _next: int = 0
    _epochs: int = 0

    def __post_init__(self) -> None:
        starts = range(0, len(self.samples) - self.batch_size + 1, self.batch_size)
        count = len(starts) if self.most is None else min(self.most, len(starts))
        self._starts = [starts[i * len(starts) // count] for i in range(count)]

    def __next__(self) -> Batch:
        if self._next == len(self._order):
            if self._epochs and not self.loop:
                raise StopIteration
            self._drawn_from = random_state(self.random)
            self._draw(self.random)
        start = self._starts[self._order[self._next]]
        self._next += 1
        batch = self.at(start)
        if self._next < len(self._order) and isinstance(self.samples, SampleSource):
            following = self._starts[self._order[self._next]]
            self.samples.prepare(following, following + self.batch_size)
        return batch

    def at(self, start: int) -> Batch:
        """Return the batch that begins at a sample."""
        samples = self.samples[start : start + self.batch_size]
        batch = make_batch(samples, self.max_seq_length, self.widths)
        if not (self.swaps and isinstance(samples, Samples)):
            return batch
        others = make_batch(swapped(samples), self.max_seq_length, self.widths)
        return replace(batch, swapped=others)

    def first(self, count: int) -> list[int]:
        """Return the samples at which the first batches begin, before any is drawn: of all, in any
        order, if there are fewer."""
        random = np.random.RandomState()
        random.set_state(random_state(self.random))
        return [self._starts[i] for i in random.permutation(len(self._starts))[:count].tolist()]

    def _draw(self, random: np.random.RandomState) -> None:
        self._order = random.permutation(len(self._starts)).tolist()
        self._next = 0
        self._epochs += 1
        if not len(self._order):
            raise StopIteration

    def position(self) -> dict[str, Any]:
        """Return the position in the data, for ``in_json``: enough to go on with the same batches.
        No number is copied."""
        return {"drawn_from": self._drawn_from, "epoch": self._epochs, "next": self._next}

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go on from a ``position()`` of batches of the same samples."""
        if not position["epoch"]:
            return
        self._drawn_from = position["drawn_from"]
        random = np.random.RandomState()
        random.set_state(self._drawn_from)
        self._draw(random)
        self._epochs = position["epoch"]
        self._next = position["next"]


def swapped(samples: Samples) -> Samples:
    """Return each prompt with the answer of the sample before, the first with the last one's."""
    rows = []
    bounds = []
    begin = 0
    for i in range(len(samples)):
        tokens, start = samples[i]
        others, theirs = samples[i - 1]
        rows += [tokens[:start], others[theirs:]]
        end = begin + start + len(others) - theirs
        bounds.append((begin, end, start))
        begin = end
    known = None if samples.known is None else samples.known.copy()
    if known is not None:
        known[:, REFERENCE] = known[:, SWAPPED]
    return Samples(np.concatenate(rows), np.array(bounds, np.int64), known)


def random_state(random: np.random.RandomState) -> dict[str, Any]:
    """Return a copy of the state of a generator, which its ``set_state`` takes."""
    state: dict[str, Any] = random.get_state(legacy=False)
    return state


def in_json(position: Any) -> Any:
    """Return a position, or a part of one, as JSON: with lists in the place of arrays."""
    if isinstance(position, list):
        return [*map(in_json, position)]
    if isinstance(position, Mapping):
        return {name: in_json(part) for name, part in position.items()}
    return position.tolist() if isinstance(position, np.ndarray | np.generic) else position


def split(batch: Batch, dp: int, replica: int, micro_batch_rows: int) -> list[MicroBatch]:
    """Return the micro-batches of one replica; the last may have fewer rows than the others."""
    rows = len(batch.tokens) // dp
    start = replica * rows
    stop = start + rows
    return [
        batch.rows(i, min(i + micro_batch_rows, stop)) for i in range(start, stop, micro_batch_rows)
    ]


def pack(
    batch: Batch, count: int, together: int = 1, *, shares_prompts: bool = False
) -> list[MicroBatch]:
    """Pack the rows into ``count`` micro-batches of one row each, about equally long.

    There is no padding. Longest rows first, each goes to the shortest micro-batch so far (LPT:
    Graham 1969), with the others of its ``together``. No micro-batch gets longer than the longest
    row times rows / ``count``. With ``shares_prompts`` the second of a pair shares the prompt of
    the first, which is there once.
    """
    # Tokens after the last counted target have no effect.
    ends = np.clip(batch.spans[:, 1], 1, batch.shape[1])
    begins = _shared(batch, ends) if shares_prompts else np.zeros_like(ends)
    lengths = ends - begins
    packed: list[list[int]] = [[] for _ in range(count)]
    of_groups = lengths.reshape(-1, together).sum(axis=1)
    shortest = [(0, number) for number in range(count)]  # a heap: of two alike the first one
    for group in np.argsort(-of_groups, kind="stable").tolist():
        length, number = shortest[0]
        packed[number].extend(range(group * together, (group + 1) * together))
        heapq.heapreplace(shortest, (length + int(of_groups[group]), number))
    return [
        replace(
            batch,
            places=PackedPositions(
                np.repeat(np.array(rows, np.int32), lengths[rows]),
                np.concatenate([np.arange(begins[r], ends[r], dtype=np.int32) for r in rows]),
            ),
        )
        for rows in map(sorted, packed)
    ]


def _shared(batch: Batch, ends: np.ndarray) -> np.ndarray:
    """Return how many positions the second of each pair has as the first, with no target that
    counts: 0 for the first."""
    alike = (batch.tokens[0::2] == batch.tokens[1::2]).cumprod(axis=1).sum(axis=1)
    uncounted = np.maximum(batch.spans[1::2, 0] - 1, 0)
    shared = np.zeros_like(ends)
    shared[1::2] = np.minimum.reduce([alike, uncounted, ends[0::2], ends[1::2] - 1])
    return shared
