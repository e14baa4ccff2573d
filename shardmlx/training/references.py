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

from shardmlx.common.digests import json_digest
from shardmlx.common.durable_files import PARTIAL, replace_durably, write_durably
from shardmlx.engine.batches import REFERENCE, SWAPPED, Batches, Samples
from shardmlx.training.batch_feed import BatchFeed
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
        self._run = json_digest(job.identity)
        self._kept: dict[str, np.ndarray] = {}
        if job.identity is not None and self._file is not None and self._file.exists():
            self._kept = self._read(self._file)

    def complete(self, name: str, batches: Batches | None, most: int) -> None:
        """Compute what the first ``most`` batches of a set lack: they are on rank 0. All ranks must
        call it."""
        job, transport = self._job, self._job.transport
        samples, starts = self._samples(name), []
        if samples is not None and batches is not None:
            starts = [each for each in batches.first(most) if self._lacks(samples, each)]
        count: int = transport.broadcast(len(starts), what="references")
        if not count:
            return
        doing, done = f"reference of the {name} set", 0
        at_once = -(-4 * job.planned.plan.mesh.pp // job.planned.plan.microbatches)
        lacking = None if batches is None else map(batches.at, starts)
        found: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        transport.activity.begin(doing)
        feed = BatchFeed(job.planned.plan, transport, lacking, count)
        with job.reporter.bar(doing, count) as bar, feed:
            while shares := feed.take(at_once):
                feed.send_ahead(at_once)
                for column in self._columns:
                    parts = [
                        (i, each)
                        for i, share in enumerate(shares, done)
                        for each in (share.swapped if column == SWAPPED else share.microbatches)
                    ]
                    results = job.engine.evaluate([each for _, each in parts])
                    for j, logps in results.items():
                        i, each = parts[j]
                        found.append((i, column, each.first_row + each.row_numbers, logps))
                done += len(shares)
                bar.advance(len(shares))
        gathered = transport.gather(found, what="references")
        if samples is not None and gathered is not None:
            assert samples.known is not None, "an objective knows its rows"
            for i, column, rows, logps in (each for rank in gathered for each in rank):
                samples.known[starts[i] + rows, column] = logps
            self._kept[name] = np.ascontiguousarray(samples.known[:, _KEPT])
            self._write()

    def _samples(self, name: str) -> Samples | None:
        """Return the samples on rank 0, with the numbers that are kept of them."""
        data = self._job.planned.data
        samples: Samples | None = None if data is None else getattr(data, name)
        if samples is not None and samples.known is not None and name in self._kept:
            samples.known[:, _KEPT] = self._kept[name]
        return samples

    def _lacks(self, samples: Samples, start: int) -> bool:
        assert samples.known is not None, "an objective knows its rows"
        rows = slice(start, start + self._job.planned.way.batch.batch_size)
        return bool(np.isnan(samples.known[rows, self._columns]).any())

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
