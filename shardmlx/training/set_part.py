"""A part of a data set, whose rows become samples when their turn comes. No MLX, no MPI.

At the start every row is read, which finds most mistakes, and so many become tokens as can be
within a second: all rows of a small part. The others' lengths are estimated by their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.config.data import WantedData
from shardmlx.config.objective import SFT, rows_together
from shardmlx.engine.batches import Sample, counted_in
from shardmlx.errors import UserError, unknown_token
from shardmlx.training.data_files import row_name
from shardmlx.training.data_sources import RawSet
from shardmlx.training.row_form import RowTokens
from shardmlx.training.row_forms import find_form
from shardmlx.training.row_notes import RowNotes, how_many

MOST_ROWS, MOST_BYTES = 1000, 2 << 20
"""Rows of a part, and their bytes, that become tokens at the start."""

_LONGEST_ROWS = 128
"""Rows that are looked at in search of the longest, at most."""

_MARGIN = 1.5
"""Factor by which a row may have more tokens a byte than any that was looked at."""

_KEPT_TOKENS = 1 << 24
"""Tokens of a part that stay in memory, where it is not small."""


@dataclass(frozen=True, slots=True)
class RowReading:
    """The way to read rows: as a run has ``wanted`` them, and the model's tokenizer, its limit of
    ``positions``, and the size of its ``vocabulary``."""

    wanted: WantedData
    tokenizer: TokenizerWrapper
    positions: int | None = None
    vocabulary: int | None = None
    lock: RLock = field(default_factory=RLock)
    """Held by the thread that makes tokens: not every tokenizer lets two at a time."""


class SetPart:
    """The rows of one file, or of one data set of a mixture.

    ``lengths`` (rows, answers) are those of the samples of the rows that became tokens, in tokens;
    -1 for others. ``counted`` says how many of these tokens count in the loss. ``wanted`` (rows,
    answers) says which answers are. ``sizes`` are bytes of rows, ``columns`` the numbers of their
    columns, ``is_lost`` those that are left out, and
    ``first_looked_at`` the numbers of those that became tokens at the start.
    """

    def __init__(self, raw: RawSet, how: RowReading) -> None:
        wanted = how.wanted
        self.name = raw.name
        self.rows = raw.rows
        self.notes = RowNotes(raw.name)
        self.together = rows_together(wanted.objective)
        self.most = wanted.max_seq_length
        self.how = how
        self._is_preference = wanted.objective != SFT
        self._form = find_form(
            raw.rows[0],
            wanted,
            raw.keys,
            how.tokenizer,
            self.notes,
            adds_nulls=raw.adds_nulls,
        )
        count = len(raw.rows)
        self.lengths = np.full((count, self.together), -1, np.int32)
        self.counted = np.zeros((count, self.together), np.int32)
        self.wanted = np.ones((count, self.together), bool)
        self.sizes = np.zeros(count, np.int64)
        self.columns = np.zeros(count, np.int32)
        self.is_lost = np.zeros(count, bool)
        self.first_looked_at = np.empty(0, np.int64)
        self.is_complete = False
        self.longest = 0
        self.cut = 0
        """Samples longer than a sequence may be; of preferences, rows with shortened prompts."""
        self.idle = 0
        """Samples without a token that counts."""
        self._kept: dict[int, list[Sample]] = {}
        self._tokens = 0
        self._is_cut_said = False

    def read(self, numbers: Iterable[int]) -> None:
        """Check all rows, of these ``numbers``, as far as can be without tokens. Raises
        ``UserError``."""
        sizes = getattr(self.rows, "sizes", None)
        for i, row in zip(numbers, self.rows, strict=True):
            self.notes.take(row)
            self.wanted[i] = self._form.check(row, row_name(self.name, i))
            self.columns[i] = len(row)
            if sizes is None:
                self.sizes[i] = len(str(row))
        if sizes is not None:
            self.sizes[:] = sizes

    def look_around(self) -> None:
        """Make tokens of all rows, or of some all over the part, and of those that may be the
        longest. Raises ``UserError``."""
        self._look_around()
        self.first_looked_at = self.looked_at

    def _look_around(self) -> None:
        count = len(self.rows)
        step = max(1, -(-count // MOST_ROWS), -(-int(self.sizes.sum()) // MOST_BYTES))
        self.is_complete = step == 1
        for row in range(0, count, step):
            self.samples(row)
        if self.is_complete:
            return
        bounds = self.sizes * self._density
        for row in np.argsort(-bounds, kind="stable")[:_LONGEST_ROWS].tolist():
            if self.longest >= self.most or bounds[row] <= self.longest:
                break
            self.samples(row)
        if self._is_preference:
            # Which rows are left out decides which rows stand together in a batch.
            for row in np.flatnonzero((_MARGIN * bounds > self.most) & ~self._is_known).tolist():
                self.samples(row)

    def samples(self, row: int) -> list[Sample]:
        """Return the samples of a row: none if it is left out. Raises ``UserError``."""
        with self.how.lock:
            if row not in self._kept:
                self._keep(row)
            return self._kept[row]

    def _keep(self, row: int) -> None:
        found = self._tokenised(row, self.most)
        self._kept[row] = found
        self._tokens += sum(len(tokens) for tokens, _ in found)
        while self._tokens > _KEPT_TOKENS and not self.is_complete and len(self._kept) > 1:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._tokens -= sum(len(tokens) for tokens, _ in oldest)

    def whole_samples(self, row: int) -> list[Sample]:
        """Return the samples of a row with all tokens of a text that is cut."""
        return self._tokenised(row, None) if self.has_cut else self.samples(row)

    @property
    def has_cut(self) -> bool:
        """True if of some text not all tokens were made."""
        return self._form.has_cut

    def estimated(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of all samples, and how many of their tokens count: (rows, answers),
        of rows that were not looked at as their bytes suggest."""
        known = self._is_known
        if known.all():
            return self.lengths, self.counted
        seen = np.minimum(self.lengths[known], self.most)
        tokens_a_byte = self.lengths[known].mean() / max(1.0, self.sizes[known].mean())
        lengths = np.clip(np.rint(self.sizes * tokens_a_byte), 1, max(1, self.longest))
        share = self.counted[known].sum() / max(1, seen.sum())
        lengths = np.repeat(lengths[:, None], self.together, axis=1).astype(np.int32)
        counted = np.rint(np.minimum(lengths, self.most) * share).astype(np.int32)
        known = known[:, None]
        return np.where(known, self.lengths, lengths), np.where(known, self.counted, counted)

    def news(self) -> list[str]:
        """Return what is to be said of the rows, and was not said before. Raises ``UserError`` if
        no row is left."""
        with self.how.lock:
            return [*self.notes.news(is_complete=self.is_complete), *self._news_of_cuts()]

    @property
    def looked_at(self) -> np.ndarray:
        """The rows that have become tokens, by number."""
        return np.flatnonzero(self._is_known)

    @property
    def _is_known(self) -> np.ndarray:
        known: np.ndarray = self.lengths[:, 0] >= 0
        return known

    @property
    def _density(self) -> float:
        """The most tokens a byte of the rows that have become tokens."""
        known = self._is_known
        return float((self.lengths[known].max(axis=1) / np.maximum(self.sizes[known], 1)).max())

    def _tokenised(self, row: int, most: int | None) -> list[Sample]:
        where = row_name(self.name, row)
        given = self.rows[row]
        answers = self._form.samples(given, where, most)
        for tokens, _ in answers:
            self._check(tokens, where)
        is_new = self.lengths[row, 0] < 0
        if self._is_preference:
            too_long = max(len(tokens) for tokens, _ in answers) - self.most
            if too_long > 0:
                head = self._form.head(given, where)
                room = min(start for _, start in answers) - head
                self.is_lost[row] = room <= too_long
                answers = [_shortened(*answer, head, too_long) for answer in answers]
                self.cut += bool(is_new and not self.is_lost[row])
        if is_new:
            self._count(row, answers)
        if self.is_lost[row]:
            return []
        return [(np.array(tokens, np.int32), start) for tokens, start in answers]

    def _count(self, row: int, answers: Sequence[RowTokens]) -> None:
        """Count the tokens of a row that has become tokens for the first time."""
        for number, (tokens, start) in enumerate(answers):
            length = len(tokens)
            counted = counted_in(tokens, start, self.most)
            # Number by number: NumPy takes longer to look through a list.
            self.lengths[row, number] = length
            self.counted[row, number] = counted
            if not self.is_lost[row]:
                self.longest = max(self.longest, length)
                self.idle += counted == 0
                self.cut += length > self.most and not self._is_preference

    def _check(self, tokens: Sequence[int], where: str) -> None:
        """Raise ``UserError`` for a row without a token, one that is too long, or one with a token
        unknown to the model."""
        if not tokens:
            raise UserError(f"{where} gives no token", "take the row out")
        positions = self.how.positions
        vocabulary = self.how.vocabulary
        if positions is not None and positions < self.most and len(tokens) > positions:
            raise UserError(
                f"{where} has {len(tokens)} tokens, and the model's limit is {positions}",
                f"use --max-seq-length {positions} to cut it",
            )
        seen = tokens[: self.most]
        if vocabulary is not None and max(max(seen), ~min(seen)) >= vocabulary:
            ids = (max(token, ~token) for token in seen)
            unknown = next(each for each in ids if each >= vocabulary)
            raise unknown_token(where, unknown, vocabulary)

    def _news_of_cuts(self) -> list[str]:
        """Return what is said of prompts of preferences that are too long."""
        if not self._is_preference or self._is_cut_said:
            return []
        what = "pairs" if self.together > 1 else "rows"
        total = len(self.rows)
        lost = int(self.is_lost.sum())
        self._is_cut_said = bool(self.cut or lost)
        lines = []
        if self.cut:
            count = how_many(self.cut, total, is_of_all=self.is_complete)
            lines.append(
                f"{self.name}: the prompts of {count} {what} are cut from the left, so that the "
                f"answers fit in --max-seq-length {self.most}; their system messages stay"
            )
        if lost:
            count = how_many(lost, total, is_of_all=self.is_complete)
            problem = (
                f"{self.name}: {count} {what} have an answer that leaves no room for its prompt in "
                f"--max-seq-length {self.most}"
            )
            if lost == total:
                raise UserError(problem, "raise it")
            lines.append(f"{problem}: they are left out")
        return lines


def _shortened(tokens: list[int], start: int, head: int, too_long: int) -> RowTokens:
    """Return a sample without so many tokens of its prompt behind the ``head``."""
    return [*tokens[:head], *tokens[head + too_long :]], start - too_long
