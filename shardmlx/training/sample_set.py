"""A data set as a sequence of samples, each of which becomes tokens when its turn comes. No MLX, no
MPI."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, overload

import numpy as np

from shardmlx.checkpoint.run_identity import SetFacts, labels_digest, tokens_digest
from shardmlx.engine.batches import BASELINE, KNOWN, WANTED, Sample, Samples, SampleSource
from shardmlx.errors import UserError
from shardmlx.training.data_files import row_name
from shardmlx.training.row_notes import how_many
from shardmlx.training.set_part import SetPart


class RowError(UserError):
    """A row that cannot be used, found when its turn came."""


class SampleSet(SampleSource):
    """The samples of ``parts``: ``places`` (samples, 2) are their part, and their number in it.

    ``known`` (samples, KNOWN), float64, is what an objective of preferences knows; None without
    one. ``name`` is the first part's.
    """

    def __init__(
        self, parts: Sequence[SetPart], places: np.ndarray, known: np.ndarray | None = None
    ) -> None:
        self.parts = parts
        self.known = known
        self._places = places
        self._said: set[str] = set()
        self._ahead: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, parts: Sequence[SetPart], places: np.ndarray, *, knows: bool) -> SampleSet:
        """Return the set of these places; ``knows`` says that it is for an objective of
        preferences."""
        if not knows:
            return cls(parts, places)
        known = np.full((len(places), KNOWN), np.nan)
        known[:, BASELINE] = 0
        wanted = _placed([part.wanted for part in parts], places)
        known[:, WANTED] = wanted
        return cls(parts, places, known)

    def with_own_known(self) -> SampleSet:
        """Return the same samples, for a run to note what its own start knows of them."""
        known = None if self.known is None else self.known.copy()
        return SampleSet(self.parts, self._places, known)

    @classmethod
    def joined(cls, sets: Sequence[SampleSet]) -> SampleSet:
        """Return the samples of all sets in one, without what is known of them."""
        firsts = np.cumsum([0, *(len(each.parts) for each in sets)])[:-1]
        places = [
            each._places + np.array([first, 0]) for each, first in zip(sets, firsts, strict=True)
        ]
        parts = [part for each in sets for part in each.parts]
        return cls(parts, np.concatenate([_NO_PLACES, *places]))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice | np.ndarray) -> Samples: ...
    def __getitem__(self, i: int | slice | np.ndarray) -> Sample | Samples:
        """Return a sample, or several. Raises ``RowError``."""
        self._wait()
        try:
            if not isinstance(i, (slice, np.ndarray)):
                return self._sample(*self._places[i].tolist())
            found = [self._sample(*place) for place in self._places[i].tolist()]
        except UserError as error:
            raise RowError(error.problem, error.remedy) from None
        return Samples.of(found, None if self.known is None else self.known[i])

    def prepare(self, start: int, stop: int) -> None:
        """Make tokens of samples that are asked for next, beside what goes on."""
        if self.is_complete:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tokeniser")
        self._ahead = self._thread.submit(self._prepare, self._places[start:stop].tolist())

    def _prepare(self, places: Sequence[tuple[int, int]]) -> None:
        for place in places:
            self._sample(*place)

    def _wait(self) -> None:
        if self._ahead is not None:
            self._ahead.exception()  # it comes again where the row is asked for
            self._ahead = None

    def _sample(self, number: int, place: int) -> Sample:
        part = self.parts[number]
        row, answer = divmod(place, part.together)
        samples = part.samples(row)
        if not samples:
            raise UserError(
                f"{row_name(part.name, row)} has an answer that leaves no room for its prompt in "
                f"--max-seq-length {part.most}",
                "raise it, or take the row out",
            )
        return samples[answer]

    # Facts of all samples.

    @property
    def is_complete(self) -> bool:
        """True if all rows have become tokens."""
        return all(part.is_complete for part in self.parts)

    @property
    def name(self) -> str:
        """The name of the first part."""
        return self.parts[0].name

    @property
    def lengths(self) -> np.ndarray:
        """Lengths in tokens, of rows that were not looked at as their bytes suggest; none is longer
        than the longest that is known."""
        return _placed([part.estimated()[0] for part in self.parts], self._places)

    def counted(self, most: int) -> np.ndarray:
        """Return how many of each sample's tokens count in the loss, as ``lengths`` are known."""
        counted = _placed([part.estimated()[1] for part in self.parts], self._places)
        limited: np.ndarray = np.minimum(counted, most)
        return limited

    def news(self) -> list[str]:
        """Return what is to be said of the samples, and was not said before. Raises ``UserError``
        if none that was looked at has a token to learn."""
        lines = [line for part in self.parts for line in part.news()]
        return [*lines, *self._news_of_losses()] if self.parts else lines

    def _news_of_losses(self) -> list[str]:
        """Return what is said of cuts, and of samples without a loss."""
        is_of_all = self.is_complete
        most = self.parts[0].most
        total = len(self)
        if is_of_all:
            cut = int((self.lengths > most).sum())
            idle = int((self.counted(most) == 0).sum())
            looked_at = total
        else:
            cut = sum(part.cut for part in self.parts if self.known is None)
            idle = sum(part.idle for part in self.parts)
            looked_at = sum(part.together * len(part.looked_at) for part in self.parts)
        lines = []
        if cut and "cut" not in self._said:
            self._said.add("cut")
            longest = str(max(part.longest for part in self.parts))
            which = "the longest" if is_of_all else "the longest so far"
            longest = f"over {most}" if any(part.has_cut for part in self.parts) else longest
            lines.append(
                f"{self.name}: {how_many(cut, total, is_of_all=is_of_all)} sequences are longer "
                f"than --max-seq-length {most} and are cut ({which} has {longest})"
            )
        problem = (
            f"{self.name}: {how_many(idle, total, is_of_all=is_of_all)} sequences have no token to "
            f"learn: the answer is empty or beyond --max-seq-length {most}, or a text is one token"
        )
        if idle and idle == looked_at:
            raise UserError(problem, "raise it, or write answers")
        if idle and "idle" not in self._said:
            self._said.add("idle")
            lines.append(f"{problem}: nothing is learnt from them")
        return lines

    # The identity of a run.

    def facts(self, then: Mapping[str, Any] | None = None) -> SetFacts:
        """Return the facts of the set: the same ones as those of ``then``, as a checkpoint keeps
        them, if they are given."""
        is_whole = self.is_complete and not any(part.has_cut for part in self.parts)
        by_content = not is_whole if then is None else "content" in then
        if not by_content:
            return SetFacts.of(self._whole(), self.known)
        return SetFacts(
            samples=len(self),
            longest=max((part.longest for part in self.parts), default=0),
            labels=labels_digest(self.known),
            content=self._content_digest(),
            looked_at=tokens_digest(
                sample
                for part in self.parts
                for row in part.first_looked_at.tolist()
                for sample in part.samples(row)
            ),
        )

    def _whole(self) -> Iterator[Sample]:
        """Yield all samples, with all tokens of texts that are cut."""
        for number, place in self._places.tolist():
            part = self.parts[number]
            row, answer = divmod(place, part.together)
            yield part.whole_samples(row)[answer]

    def _content_digest(self) -> str:
        """Return a digest of what the columns that are read hold, in the order of the samples."""
        digest = hashlib.sha256()
        for number, place in self._places.tolist():
            part = self.parts[number]
            row, answer = divmod(place, part.together)
            if answer == 0:
                given = part.rows[row]
                read = {key: given[key] for key in part.notes.columns_read if key in given}
                digest.update(json.dumps(read, default=str).encode())
        return digest.hexdigest()


_NO_PLACES = np.empty((0, 2), np.int64)

NO_SAMPLES = SampleSet((), _NO_PLACES)


def _placed(values: Sequence[np.ndarray], places: np.ndarray) -> np.ndarray:
    """Return the values, (rows, answers) for each part, of samples at these places."""
    if not len(values):
        return np.empty(0, np.int32)
    firsts = np.cumsum([0, *(each.size for each in values)])[:-1]
    flat = np.concatenate([each.ravel() for each in values])
    placed: np.ndarray = flat[firsts[places[:, 0]] + places[:, 1]]
    return placed
