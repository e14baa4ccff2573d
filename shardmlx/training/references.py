"""Log-probabilities of the answers under the model as the run starts.

The reference of a preference is the run's own model before its first update: the same stages, so
that no second model is in memory. A resumed run has it too, before its checkpoint is read. Numbers
that were computed are kept beside the checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from shardmlx.checkpoint.run_identity import set_digest, start_digest
from shardmlx.common.durable_files import PARTIAL, replace_durably, write_durably
from shardmlx.engine.batches import REFERENCE, SWAPPED
from shardmlx.training.evaluation import Evaluation
from shardmlx.training.run_worker import RunWorker

FILE = "references.safetensors"

_KEPT = [REFERENCE, SWAPPED]
"""Columns of what is known of samples that are kept on disk."""

_RUN = "run"
_OF_SET = "set of "
"""Names in the file's metadata: a digest of the start of the run, and that of each set."""


class References:
    """The reference numbers of a run's data sets, on rank 0."""

    def __init__(self, evaluation: Evaluation, *, swaps: bool) -> None:
        self._evaluation = evaluation
        self._crew = evaluation.crew
        self._run = run = self._crew.worker.run
        self._columns = [REFERENCE, SWAPPED] if swaps else [REFERENCE]
        place = run.resumption.place
        self._file = None if place is None else Path(place.store.directory) / FILE
        self._start = "" if run.identity is None else start_digest(run.identity)
        self._kept: dict[str, np.ndarray] = {}
        self._digests: dict[str, str] = {}
        """Digests of the sets whose numbers are kept: no identity of a run knows its test set."""
        if run.identity is not None and self._file is not None and self._file.exists():
            self._kept, self._digests = self._read(self._file)

    def complete(self, name: str, most: int) -> None:
        """Compute what the first ``most`` batches of a set lack. Raises ``StopRequested``."""
        known = self._known(name)
        if known is None:
            return
        batches = self._evaluation.batches(name, loop=False)
        size = self._run.training.way.batch.batch_size
        lacking = np.isnan(known[:, self._columns]).any(axis=1)
        starts = [each for each in batches.first(most) if lacking[each : each + size].any()]
        if not starts:
            return
        what = f"reference of the {name} set"
        at = 0
        with self._run.reporter.bar(what, len(starts)) as bar:
            for rows in self._evaluation.groups(
                self._evaluation.draw(name, map(batches.at, starts))
            ):
                args = [(of_rank, self._columns, what) for of_rank in rows]
                for of_rank in self._crew.begin_each(RunWorker.judge, args).values():
                    for each in of_rank:
                        known[starts[at + each.batch] + each.rows, each.column] = each.logps
                at += len(rows[0])
                bar.advance(len(rows[0]))
        self._kept[name] = np.ascontiguousarray(known[:, _KEPT])
        self._digests[name] = self._digest(name)
        self._write()

    def _known(self, name: str) -> np.ndarray | None:
        """Return what is known of a set's samples, with the numbers that are kept; None for a set
        without samples."""
        assert self._run.data is not None, "rank 0 has the data"
        known: np.ndarray | None = getattr(self._run.data, name).known
        if known is not None and name in self._kept and self._digests[name] == self._digest(name):
            known[:, _KEPT] = self._kept[name]
        return known

    def _digest(self, name: str) -> str:
        most = self._run.training.way.batch.max_seq_length
        return set_digest(getattr(self._run.data, name).facts(), most)

    def _read(self, file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Return the numbers that a file keeps of this run, and the digests of their sets."""
        try:
            with safe_open(file, "numpy") as opened:
                metadata = opened.metadata() or {}
                if metadata.get(_RUN) == self._start:
                    names = [each for each in opened.keys() if _OF_SET + each in metadata]  # noqa: SIM118
                    digests = {name: metadata[_OF_SET + name] for name in names}
                    return {name: opened.get_tensor(name) for name in names}, digests
        except (OSError, SafetensorError) as error:
            self._run.reporter.warn(f"{file} cannot be read ({error}): computed again")
        return {}, {}

    def _write(self) -> None:
        if self._file is None or self._run.identity is None:
            return
        partial = self._file.with_name(PARTIAL + FILE)
        try:
            digests = {_OF_SET + name: digest for name, digest in self._digests.items()}
            write_durably(partial, save(self._kept, {_RUN: self._start, **digests}))
            replace_durably(partial, self._file)
        except OSError as error:
            # A resumed run would compute them again.
            self._run.reporter.warn(f"cannot write {self._file}: {error.strerror or error}")
