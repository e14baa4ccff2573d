"""Save and restore a training run: the content of a checkpoint, and the waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from shardmlx.checkpoint.reader import CheckpointReader, SoundCheckpoint
from shardmlx.checkpoint.store import Manifest
from shardmlx.checkpoint.writer import SECONDS_TO_WRITE, CheckpointWriter, Snapshot
from shardmlx.common.formatting import gibibytes
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.version_check import package_versions
from shardmlx.engine.optimizer import Updater
from shardmlx.training.island import Island
from shardmlx.training.setup import TrainingRun

WEIGHTS, OPTIMIZER, ERRORS, ISLAND = "weights", "optimizer", "errors", "island"


@dataclass(frozen=True, slots=True)
class Point:
    """The run right after an optimizer update, but for weights; ``state`` is only rank 0's."""

    step: int
    state: Mapping[str, Any]


class Checkpoints:
    """Saves a run at its last optimizer update. Methods are collective unless they say not.

    Only gradients and the position in the data change between two updates; so a run always saves
    its last update. Writing goes on while the next steps compute, up to the next update::

        mark(point)   save()        with updating() as updater:       mark(point)   ...
        |             |             |                   |             |
        update made   files begin   waits: all arrays   weights and   update made
                      to be written  are written        state change

    Only ``updating`` gives out the updater: weights cannot change while they are written.
    """

    def __init__(self, job: TrainingRun, updater: Updater, island: Island | None = None) -> None:
        self._job = job
        self._transport = job.transport
        self._updater = updater
        self._island = island
        self._writer = None
        if (place := job.resumption.place) is not None:
            keep = job.planned.config.keep_checkpoints
            self._writer = CheckpointWriter(
                job.transport, place.store, place.storage, keep, job.number
            )
        self._pieces = {
            name: each.part.pieces[name]
            for each in job.stages
            for name in each.names
            if name in each.part.pieces
        }
        self._point: Point | None = None
        self._errors: Mapping[str, mx.array] = {}
        self._saved_step = 0
        self._waits: list[Callable[[], None]] = []
        """Waits until the last save has written its arrays, and until all of it is on the disks."""
        self._exposed = 0.0
        """Seconds for which training has waited for the last save."""

    def restore(self, found: SoundCheckpoint) -> None:
        stages, engine = self._job.stages, self._job.engine
        reader = CheckpointReader(self._transport, found)
        missing = sorted(
            {name for stage in stages for name in stage.names} - set(reader.names(WEIGHTS))
        )
        lacking = self._transport.all_gather(missing, "comparing the checkpoint's weights")
        if any(lacking):
            name = next(names[0] for names in lacking if names)
            raise AgreedError(f"the checkpoint of step {found.manifest.step} lacks {name}")
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

    def go_on_from(self, found: SoundCheckpoint, point: Point) -> None:
        """Resume the run at a restored ``point``, which is not saved again in the same place."""
        self.mark(point)
        place = self._job.resumption.place
        if place is not None and place.store is found.store:
            self._saved_step = point.step

    @contextmanager
    def updating(self) -> Iterator[Updater]:
        """Give out the updater, once the weights being saved are written."""
        self._wait(left=1)
        yield self._updater

    def mark(self, point: Point) -> None:
        """Note that an update was made: ``save`` would now save ``point``. Not collective."""
        self._point = point
        if self._writer is not None:
            # Sums may change the rounding errors before ``save``, and while it writes.
            self._errors = self._job.engine.reducer.errors.state()

    def save(self) -> int | None:
        """Begin to save the last update unless it is saved; return its step, if there is one."""
        point = self._point
        if self._writer is None or point is None or point.step == self._saved_step:
            return self._saved_step or None
        self.finish()
        start = time.monotonic()
        self._writer.start(self._manifest(point), point.step, self._parts())
        self._waits = [self._writer.release, self._writer.wait]
        self._exposed = time.monotonic() - start
        self._saved_step = point.step
        return point.step

    def finish(self) -> None:
        self._wait(left=0)
        self.report()

    def _wait(self, left: int) -> None:
        """Wait until ``left`` waits of a save are to come, all ranks as long as the slowest."""
        while len(self._waits) > left:
            start = time.monotonic()
            with self._transport.longer_timeout(SECONDS_TO_WRITE):
                self._waits[0]()
                seconds = time.monotonic() - start
                waits = self._transport.all_gather(seconds, "waiting for the checkpoint")
                self._exposed += max(waits)
            del self._waits[0]

    def report(self) -> None:
        """Report a checkpoint that was completed since the last call. Not collective."""
        if self._writer is None or len(self._waits) > 1:
            return
        saved = self._writer.take_saved()
        if saved is None:
            return
        self._job.reporter.say(
            f"step {saved.step}: checkpoint of {gibibytes(saved.nbytes)} written in "
            f"{saved.seconds:.1f} s, for which training waited {self._exposed:.2f} s"
        )
        self._job.reporter.event(
            "checkpoint",
            {
                "step": saved.step,
                "bytes": saved.nbytes,
                "seconds": round(saved.seconds, 3),
                "exposed_seconds": round(self._exposed, 3),
            },
        )

    def _manifest(self, point: Point) -> Manifest | None:
        """Return, on rank 0, the manifest of the checkpoint but for its files."""
        if self._transport.rank != 0:
            return None
        assert self._job.identity is not None, "rank 0 has it"
        plan = self._job.planned.plan
        return Manifest(
            step=point.step,
            files=(),
            identity=self._job.identity,
            state=point.state,
            plan={  # for people to read: any layout can resume it
                **asdict(plan.mesh),
                "schedule": plan.schedule,
                "num_layers": list(plan.stage_map.partition.sizes),
                "backend": self._job.planned.cluster.backend,
            },
            versions=package_versions(),
        )

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
