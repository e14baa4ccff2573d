"""A training run's checkpoints: what goes into them, and when the run has to wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from shardmlx.checkpoint.reader import CheckpointReader, Found
from shardmlx.checkpoint.store import Manifest
from shardmlx.checkpoint.writer import SECONDS_TO_WRITE, CheckpointWriter, Saved, Snapshot
from shardmlx.common.formatting import gigabytes
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.transport import Transport
from shardmlx.distributed.version_check import package_versions
from shardmlx.engine.optimizer import Updater
from shardmlx.engine.stage import Stage
from shardmlx.pipeline.plan import Plan
from shardmlx.training.setup import Job

WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True, slots=True)
class Point:
    """The run right after an optimizer update: all of it that is neither weights nor state.

    ``mine`` is what only this rank knows of it, brought together when it is saved.
    """

    step: int
    state: Mapping[str, Any]
    mine: Any = None


class Checkpoints:
    """Saves a run at its last optimizer update. All methods are collective.

    Between two updates nothing changes but gradients and the position in the data; so whenever
    the run is asked to save, it saves the last update.
    """

    def __init__(self, job: Job, updater: Updater) -> None:
        self._job = job
        self._transport = job.transport
        self._updater = updater
        self._writer = None
        if (place := job.resumption.place) is not None:
            self._writer = CheckpointWriter(
                job.transport,
                place.store,
                place.storage,
                job.config.keep_checkpoints,
            )
        self._point: Point | None = None
        self._saved_step = 0
        self._is_written = True
        self._is_complete = True
        self._exposed = 0.0
        self._exposed_seconds: list[float] = []
        self._saved: list[Saved] = []

    def mark(self, point: Point) -> None:
        """An update was made: a checkpoint would now be of ``point``."""
        self._point = point

    def resumed(self, step: int) -> None:
        """The run goes on from a checkpoint of ``step``, which need not be saved again."""
        self._saved_step = step

    def save(self) -> int | None:
        """Begin to save the last update, unless that is done; the step of what is saved then."""
        if self._writer is None:
            return None
        point = self._point
        if point is None or point.step == self._saved_step:
            return self._saved_step or None
        self.finish()
        start = time.monotonic()
        everyone = self._transport.gather(point.mine, what="checkpoint")
        manifest = None
        if everyone is not None:
            assert self._job.identity is not None, "rank 0 has it"
            manifest = Manifest(
                step=point.step,
                files=(),
                identity=self._job.identity,
                state={**point.state, "ranks": everyone},
                plan=_layout(self._job.plan),
                versions=package_versions(),
            )
        self._writer.start(manifest, point.step, self._parts())
        self._saved_step = point.step
        self._is_written = self._is_complete = False
        self._exposed = time.monotonic() - start
        return point.step

    def release(self) -> None:
        """Before weights change: wait until what is being saved of them is written."""
        if self._is_written or self._writer is None:
            return
        self._exposed_seconds.append(self._exposed + self._longest(self._writer.release))
        self._is_written = True

    def finish(self) -> None:
        """Wait until what is being saved is complete."""
        if self._is_complete or self._writer is None:
            return
        self.release()
        self._exposed_seconds[-1] += self._longest(self._writer.wait)
        self._is_complete = True
        self.report()

    def _longest(self, wait: Callable[[], None]) -> float:
        """Seconds that ``wait()`` took on the rank on which it took longest.

        All wait for it, so that a rank with a slow disk is not taken for one that is lost.
        """
        start = time.monotonic()
        with self._transport.longer_timeout(SECONDS_TO_WRITE):
            wait()
            seconds = time.monotonic() - start
            longest: float = max(self._transport.all_gather(seconds, "waiting for the checkpoint"))
        return longest

    def report(self) -> None:
        """Tell of a checkpoint that was completed since the last call."""
        if self._writer is None or not self._is_written:
            return
        saved = self._writer.take_saved()
        if saved is None:
            return
        self._saved.append(saved)
        exposed = self._exposed_seconds[-1]
        self._job.reporter.say(
            f"step {saved.step}: checkpoint of {gigabytes(saved.nbytes)} written in "
            f"{saved.seconds:.1f} s, for which training waited {exposed:.2f} s"
        )
        self._job.reporter.event(
            "checkpoint",
            {
                "step": saved.step,
                "bytes": saved.nbytes,
                "seconds": round(saved.seconds, 3),
                "exposed_seconds": round(exposed, 3),
            },
        )

    def summary(self) -> dict[str, Any]:
        """Of all that were completed, on rank 0. Not collective."""
        return {
            "saved": len(self._saved),
            "seconds": round(sum(each.seconds for each in self._saved), 3),
            "exposed_seconds": round(sum(self._exposed_seconds), 3),
        }

    def _parts(self) -> list[Snapshot]:
        """This rank's weights and optimizer state, each once in the whole job."""
        replica, pipeline_rank = self._job.plan.mesh.coordinates(self._transport.rank)
        if replica != 0:
            return []
        weights = {
            name: stage.part[name]
            for stage in self._job.stages
            for name in stage.names
            if stage.part.is_first or not stage.part.shares(name)
        }
        state = self._updater.state()
        kept = {
            name: array
            for name, array in state.items()
            if "." not in name or name.rpartition(".")[0] in weights
        }
        if pipeline_rank != 0:
            kept = {name: array for name, array in kept.items() if "." in name}
        return [
            Snapshot.of(f"{WEIGHTS}-{pipeline_rank:02d}.safetensors", weights),
            Snapshot.of(f"{OPTIMIZER}-{pipeline_rank:02d}.safetensors", kept),
        ]


def restore(found: Found, transport: Transport, stages: Sequence[Stage], updater: Updater) -> None:
    """Give the stages and the optimizer what a checkpoint holds for them. Collective."""
    reader = CheckpointReader(transport, found)
    missing = sorted(
        {name for stage in stages for name in stage.names} - set(reader.names(WEIGHTS))
    )
    lacking = transport.all_gather(missing, "comparing the checkpoint's weights")
    if any(lacking):
        name = next(names[0] for names in lacking if names)
        raise AgreedError(f"the checkpoint of step {found.manifest.step} lacks {name}")
    mine = {name for stage in stages for name in stage.names}
    for name, array in reader.read(WEIGHTS, mine.__contains__):
        for stage in stages:
            if name in stage.part:
                stage.part[name] = array
    state: dict[str, mx.array] = {}
    for name, array in reader.read(
        OPTIMIZER, lambda name: "." not in name or name.rpartition(".")[0] in mine
    ):
        state[name] = array
    updater.restore(state)


def _layout(plan: Plan) -> dict[str, Any]:
    """How the run was laid out: to be read by people, and compared; any layout can go on."""
    return {
        **asdict(plan.mesh),
        "schedule": plan.schedule,
        "num_layers": list(plan.stage_map.partition.sizes),
        "placement": list(plan.stage_map.placement),
        "rows": plan.rows,
        "micro_batch_size": plan.micro_batch_size,
        "digest": plan.digest,
    }
