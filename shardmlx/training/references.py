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

from shardmlx.checkpoint.run_identity import start_digest
from shardmlx.common.durable_files import PARTIAL, replace_durably, write_durably
from shardmlx.engine.batches import REFERENCE, SWAPPED, Batches
from shardmlx.training.batch_feed import Share
from shardmlx.training.losses import answers_of, evaluate_batches
from shardmlx.training.setup import TrainingRun

FILE = "references.safetensors"

_KEPT = [REFERENCE, SWAPPED]
"""Columns of what is known of samples that are kept on disk."""


class References:
    """The reference numbers of a run's data sets."""

    def __init__(self, job: TrainingRun, *, swaps: bool) -> None:
        self._job = job
        self._columns = [REFERENCE, SWAPPED] if swaps else [REFERENCE]
        place = job.resumption.place
        self._file = None if place is None else Path(place.store.directory) / FILE
        self._run = "" if job.identity is None else start_digest(job.identity)
        self._kept: dict[str, np.ndarray] = {}
        if job.identity is not None and self._file is not None and self._file.exists():
            self._kept = self._read(self._file)

    def complete(self, name: str, batches: Batches | None, most: int) -> None:
        """Compute what the first ``most`` batches of a set lack: they are on rank 0. All ranks must
        call it."""
        job, known = self._job, self._known(name)
        starts: list[int] = []
        if known is not None and batches is not None:
            size = job.planned.way.batch.batch_size
            lacking = np.isnan(known[:, self._columns]).any(axis=1)
            starts = [each for each in batches.first(most) if lacking[each : each + size].any()]
        count: int = job.transport.broadcast(len(starts), what="references")
        if not count:
            return

        def compute(shares: list[Share]) -> list[list[tuple[int, np.ndarray, np.ndarray]]]:
            found: list[list[tuple[int, np.ndarray, np.ndarray]]] = [[] for _ in shares]
            for column in self._columns:
                swapped = column == SWAPPED
                parts = [each.swapped if swapped else each.microbatches for each in shares]
                for i, part, logps in answers_of(job, parts):
                    found[i].append((column, part.first_row + part.row_numbers, logps))
            return found

        first = None if batches is None else map(batches.at, starts)
        found = evaluate_batches(job, first, count, f"reference of the {name} set", compute)
        gathered = job.transport.gather([each for part in found for each in part], "references")
        if known is not None and gathered is not None:
            for of_rank in gathered:
                for start, of_batch in zip(starts, of_rank, strict=True):
                    for column, rows, logps in of_batch:
                        known[start + rows, column] = logps
            self._kept[name] = np.ascontiguousarray(known[:, _KEPT])
            self._write()

    def _known(self, name: str) -> np.ndarray | None:
        """Return, on rank 0, what is known of a set's samples, with the numbers that are kept."""
        data = self._job.data
        known: np.ndarray | None = None if data is None else getattr(data, name).known
        if known is not None and name in self._kept:
            known[:, _KEPT] = self._kept[name]
        return known

    def _read(self, file: Path) -> dict[str, np.ndarray]:
        try:
            with safe_open(file, "numpy") as opened:
                names = opened.keys()
                if (opened.metadata() or {}).get("run") == self._run:
                    return {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            self._job.reporter.warn(f"{file} cannot be read ({error}): computed again")
        return {}

    def _write(self) -> None:
        if self._file is None or self._job.identity is None:
            return
        partial = self._file.with_name(PARTIAL + FILE)
        try:
            write_durably(partial, save(self._kept, {"run": self._run}))
            replace_durably(partial, self._file)
        except OSError as error:
            # A resumed run would compute them again.
            self._job.reporter.warn(f"cannot write {self._file}: {error.strerror or error}")
