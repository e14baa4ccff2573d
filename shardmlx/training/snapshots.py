"""A run's checkpoints on one rank: its part of their content, and the waits for them."""

from __future__ import annotations

import time
from collections.abc import Mapping

import mlx.core as mx

from shardmlx.checkpoint.reader import CheckpointReader
from shardmlx.checkpoint.store import Manifest
from shardmlx.checkpoint.writer import SECONDS_TO_WRITE, CheckpointWriter, Saved, Snapshot
from shardmlx.engine.optimizer import Updater
from shardmlx.training.island import IslandRank
from shardmlx.training.setup import TrainingRun

WEIGHTS, OPTIMIZER, ERRORS, ISLAND = "weights", "optimizer", "errors", "island"


class Snapshots:
    """Saves this rank's part of a run at its last optimizer update, and restores it.

    Only gradients and the position in the data change between two updates; so a run always saves
    its last update. Writing goes on while the next steps compute, up to the next update::

        mark()        begin()       release()           mark()   ...
        |             |             |                   |
        update made   files begin   waits: this rank's  weights and state have changed
                      to be written  arrays are written
    """

    def __init__(
        self, job: TrainingRun, updater: Updater, island: IslandRank | None = None
    ) -> None:
        self._job = job
        self._transport = job.transport
        self._updater = updater
        self._island = island
        self._writer = None
        if (place := job.resumption.place) is not None:
            keep = job.planned.config.checkpoints.keep_checkpoints
            self._writer = CheckpointWriter(
                job.transport, place.store, place.storage, keep, job.number
            )
        self._pieces = {
            name: each.part.pieces[name]
            for each in job.stages
            for name in each.names
            if name in each.part.pieces
        }
        self._errors: Mapping[str, mx.array] = {}
        self._reader: CheckpointReader | None = None

    def open(self) -> list[str]:
        """Open the checkpoint to resume, with the other ranks; return the trained weights of this
        rank that it lacks."""
        found = self._job.resumption.found
        assert found is not None, "there is one to resume"
        self._reader = CheckpointReader(self._transport, found)
        trained = {name for stage in self._job.stages for name in stage.names}
        return sorted(trained - set(self._reader.names(WEIGHTS)))

    def restore(self) -> None:
        """Take this rank's part of the checkpoint, with the other ranks."""
        found, reader = self._job.resumption.found, self._reader
        assert found is not None, "there is one to resume"
        assert reader is not None, "it was opened"
        stages, engine = self._job.stages, self._job.engine
        holds = engine.shards.holds
        mine = {name for stage in stages for name in stage.names if holds(name)}
        for name, array in reader.read(WEIGHTS, mine.__contains__, self._pieces):
            for stage in stages:
                if name in stage.part:
                    stage.part[name] = array
        updated = {name for name in mine if self._updater.updates(name)}
        state = reader.read(
            OPTIMIZER,
            lambda name: "." not in name or name.rpartition(".")[0] in updated,
            self._pieces,
        )
        self._updater.restore(dict(state))
        errors = engine.reducer.errors
        # Earlier versions could scale the loss, and so what was rounded off of its gradients.
        is_scaled = found.manifest.state.get("loss_scale", [1.0])[0] != 1.0
        for key, error in () if is_scaled else reader.read(ERRORS, errors.takes):
            errors.restore(key, error)
        if self._island is not None and (before := found.manifest.state.get(ISLAND)):
            self._island.restore(before, reader.read(ISLAND, self._island.takes))
        self._reader = None

    def mark(self) -> None:
        """Note that an update was made: ``begin`` would now save what it has left."""
        if self._writer is not None:
            # Sums may change the rounding errors before ``begin``, and while it writes.
            self._errors = self._job.engine.reducer.errors.state()

    def begin(self, manifest: Manifest, step: int) -> float:
        """Begin to write this rank's part; return the seconds that it took."""
        assert self._writer is not None, "the run has a place for checkpoints"
        start = time.monotonic()
        mine = manifest if self._transport.rank == 0 else None
        self._writer.start(mine, step, self._parts())
        return time.monotonic() - start

    def release(self) -> float:
        """Wait until the arrays of this rank may change; return the seconds of the wait."""
        return self._wait(whole=False)

    def finish(self) -> float:
        """Wait until this rank's part is written; return the seconds of the wait."""
        return self._wait(whole=True)

    def take_saved(self) -> Saved | None:
        """Return, on rank 0, the checkpoint that was completed since the last call."""
        return None if self._writer is None else self._writer.take_saved()

    def _wait(self, *, whole: bool) -> float:
        if self._writer is None:
            return 0.0
        start = time.monotonic()
        with self._transport.longer_timeout(SECONDS_TO_WRITE):
            if whole:
                self._writer.wait()
            else:
                self._writer.release()
        return time.monotonic() - start

    def _parts(self) -> list[Snapshot]:
        """Return this rank's weights, optimizer state and rounding errors, each once in the job."""
        mesh, rank = self._job.planned.plan.mesh, self._transport.rank
        replica, place = divmod(rank, mesh.pp * mesh.tp)
        whole = f"{place:02d}"
        part = f"{whole}-{replica:02d}"
        snapshots = []
        if self._errors:
            snapshots.append(Snapshot.of(f"{ERRORS}-{part}.safetensors", self._errors))
        if self._island is not None and (arrays := self._island.arrays()):
            snapshots.append(Snapshot.of(f"{ISLAND}-{part}.safetensors", arrays))
        shards = self._job.engine.shards
        if replica != 0 and not shards.divides:
            return snapshots
        weights = {
            name: stage.part[name]
            for stage in self._job.stages
            for name in stage.names
            if shards.holds(name)
            and (stage.part.is_first or not stage.part.shares(name))
            and (name in self._pieces or mesh.share(rank) == 0)
        }
        kept = {
            name: array
            for name, array in self._updater.state().items()
            if (name.rpartition(".")[0] in weights if "." in name else rank == 0)
        }
        if replica == 0 or shards.weights is not None:
            number = whole if shards.weights is None else part
            file = f"{WEIGHTS}-{number}.safetensors"
            snapshots.append(Snapshot.of(file, weights, self._pieces))
        number = part if shards.divides else whole
        file = f"{OPTIMIZER}-{number}.safetensors"
        snapshots.append(Snapshot.of(file, kept, self._pieces))
        return snapshots
