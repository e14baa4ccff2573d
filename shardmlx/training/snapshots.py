"""A run's checkpoints on one rank: its part of their content, and the waits for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from shardmlx.checkpoint.reader import CheckpointReader, Lacking, TensorRequest
from shardmlx.checkpoint.resume import SoundCheckpoint
from shardmlx.checkpoint.store import Manifest
from shardmlx.checkpoint.writer import SECONDS_TO_WRITE, CheckpointWriter, Saved, Snapshot
from shardmlx.engine.optimizer import Updater
from shardmlx.islands.shared_weights import SharedWeights
from shardmlx.modelfiles.safetensors_header import Header
from shardmlx.training.loss_scale import LOSS_SCALE
from shardmlx.training.setup import TrainingRun

WEIGHTS, OPTIMIZER, ERRORS, ISLAND = "weights", "optimizer", "errors", "island"


@dataclass(frozen=True, slots=True)
class MissingTensors:
    """The tensors that a rank misses of a checkpoint: trained weights that are ``nowhere`` in it,
    and those that it is ``lacking``: others must send them, since it sees no copy."""

    nowhere: Sequence[str]
    lacking: Lacking


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
        self, run: TrainingRun, updater: Updater, shared: SharedWeights | None = None
    ) -> None:
        self._run = run
        self._transport = run.transport
        self._updater = updater
        self._shared = shared
        self._writer = None
        if (place := run.resumption.place) is not None:
            keep = run.config.checkpoints.keep_checkpoints
            self._writer = CheckpointWriter(
                run.transport, place.store, place.storage, keep, run.number
            )
        self._pieces = {
            name: each.part.pieces[name]
            for each in run.stages
            for name in each.names
            if name in each.part.pieces
        }
        self._errors: Mapping[str, mx.array] = {}
        self._reader: CheckpointReader | None = None

    def headers(self) -> dict[str, Header]:
        """Begin to read the checkpoint to resume; return the headers of the files that this rank
        sends to others. Raises ``UserError``."""
        self._reader = CheckpointReader(self._transport, self._found)
        return self._reader.headers()

    def open(self, headers: Sequence[Mapping[str, Header]]) -> MissingTensors:
        """Open the checkpoint with the headers that all ranks have told; return what this rank
        misses of it."""
        reader = self._opened
        reader.open(headers)
        trained = {name for stage in self._run.stages for name in stage.names}
        lacking: dict[str, set[str]] = {}
        for reading in self._readings():
            lacking |= reader.lacking(reading)
        return MissingTensors(sorted(trained - set(reader.names(WEIGHTS))), lacking)

    def restore(self, lacking: Sequence[Lacking]) -> None:
        """Take this rank's part of the checkpoint, and send the others what they lack."""
        reader = self._opened
        stages = self._run.stages
        for reading in self._readings():
            arrays = reader.read(reading, lacking)
            if reading.kind == WEIGHTS:
                for name, array in arrays:
                    for stage in stages:
                        if name in stage.part:
                            stage.part[name] = array
                # References were computed with layers gathered of the weights before these.
                self._run.engine.shards.forget(name for stage in stages for name in stage.names)
            elif reading.kind == OPTIMIZER:
                self._updater.restore(dict(arrays))
            elif reading.kind == ERRORS:
                for key, error in arrays:
                    self._run.engine.reducer.errors.restore(key, error)
            elif self._shared is not None:
                self._shared.restore(arrays)
        self._reader = None

    @property
    def _found(self) -> SoundCheckpoint:
        found = self._run.resumption.found
        assert found is not None, "there is one to resume"
        return found

    @property
    def _opened(self) -> CheckpointReader:
        assert self._reader is not None, "it was begun to be read"
        return self._reader

    def _readings(self) -> list[TensorRequest]:
        """Return what this rank takes of the checkpoint, in the order in which all ranks read."""
        engine = self._run.engine
        names = {name for stage in self._run.stages for name in stage.names}
        mine = {name for name in names if engine.shards.holds(name)}
        updated = {name for name in mine if self._updater.updates(name)}

        def is_of_updated(name: str) -> bool:
            return "." not in name or name.rpartition(".")[0] in updated

        readings = [
            TensorRequest(WEIGHTS, mine.__contains__, self._pieces),
            TensorRequest(OPTIMIZER, is_of_updated, self._pieces),
        ]
        state = self._found.manifest.state
        # Earlier versions could scale the loss, and so what was rounded off of its gradients.
        if state.get(LOSS_SCALE, [1.0])[0] == 1.0:
            readings.append(TensorRequest(ERRORS, engine.reducer.errors.takes))
        if self._shared is not None and state.get(ISLAND):
            readings.append(TensorRequest(ISLAND, self._shared.takes))
        return readings

    def mark(self) -> None:
        """Note that an update was made: ``begin`` would now save what it has left."""
        if self._writer is not None:
            # Sums may change the rounding errors before ``begin``, and while it writes.
            self._errors = self._run.engine.reducer.errors.state()

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
        mesh = self._run.training.plan.mesh
        shards = self._run.engine.shards
        replica, place = divmod(self._transport.rank, mesh.pp * mesh.tp)
        whole = f"{place:02d}"
        part = f"{whole}-{replica:02d}"
        snapshots = []
        if self._errors:
            snapshots.append(Snapshot.of(f"{ERRORS}-{part}.safetensors", self._errors))
        if self._shared is not None and (arrays := self._shared.arrays()):
            snapshots.append(Snapshot.of(f"{ISLAND}-{part}.safetensors", arrays))
        if replica != 0 and not shards.divides:
            return snapshots
        weights = self._weights()
        if replica == 0 or shards.weights is not None:
            number = whole if shards.weights is None else part
            file = f"{WEIGHTS}-{number}.safetensors"
            snapshots.append(Snapshot.of(file, weights, self._pieces))
        number = part if shards.divides else whole
        file = f"{OPTIMIZER}-{number}.safetensors"
        snapshots.append(Snapshot.of(file, self._state_of(weights), self._pieces))
        return snapshots

    def _weights(self) -> dict[str, mx.array]:
        """Return the weights that this rank saves: of those that several ranks have, the first."""
        is_first_share = self._run.training.plan.mesh.share(self._transport.rank) == 0
        weights = {}
        for stage in self._run.stages:
            for name in filter(self._run.engine.shards.holds, stage.names):
                is_first = stage.part.is_first or not stage.part.shares(name)
                if is_first and (name in self._pieces or is_first_share):
                    weights[name] = stage.part[name]
        return weights

    def _state_of(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the optimizer's state of these weights, on rank 0 also what is of no weight."""
        return {
            name: array
            for name, array in self._updater.state().items()
            if (name.rpartition(".")[0] in weights if "." in name else self._transport.rank == 0)
        }
