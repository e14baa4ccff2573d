"""A run's checkpoints on rank 0: when they are due, their state, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardmlx.checkpoint.store import Manifest
from shardmlx.common.formatting import gibibytes
from shardmlx.distributed.crew import Crew
from shardmlx.distributed.version_check import package_versions
from shardmlx.engine.batches import in_json
from shardmlx.errors import UserError
from shardmlx.training.run_worker import RunWorker


@dataclass(frozen=True, slots=True)
class Point:
    """The run right after an optimizer update, but for weights: its ``state`` may have arrays,
    which become numbers only when it is saved."""

    step: int
    state: Mapping[str, Any]


class Checkpoints:
    """Lets all ranks save a run at its last optimizer update."""

    def __init__(self, crew: Crew[RunWorker]) -> None:
        self._crew = crew
        self._run = run = crew.worker.run
        self._place = run.resumption.place
        self._point: Point | None = None
        self._saved_step = 0
        self.is_writing = False
        """True until a save is reported to be on the disks."""
        self._exposed = 0.0
        """Seconds for which training has waited for the last save: of the slowest rank."""

    @property
    def have_place(self) -> bool:
        """True if the run has a directory for checkpoints: else no ``mark`` is ever saved."""
        return self._place is not None

    def restore(self) -> None:
        """Let all ranks take their part of the checkpoint to resume. Raises ``UserError``."""
        found = self._run.resumption.found
        assert found is not None, "there is one to resume"
        headers = self._crew.all(RunWorker.headers)
        missing = self._crew.all(RunWorker.missing, headers)
        untold = [name for each in missing for name in each.nowhere]
        if untold:
            step = found.manifest.step
            raise UserError(f"the checkpoint of step {step} lacks {untold[0]}")
        self._crew.all(RunWorker.restore, [each.lacking for each in missing])

    def go_on_from(self, point: Point) -> None:
        """Resume the run at a restored ``point``, which is not saved again in the same place."""
        found = self._run.resumption.found
        self.mark(point)
        if found is not None and self._place is not None and self._place.store == found.store:
            self._saved_step = point.step

    def mark(self, point: Point) -> None:
        """Note that an update was made: ``save`` would now save ``point``."""
        self._point = point

    def save(self) -> int | None:
        """Begin to save the last update unless it is saved; return its step, if there is one."""
        point = self._point
        if self._place is None or point is None or point.step == self._saved_step:
            return self._saved_step or None
        self.finish()
        seconds = self._crew.all(RunWorker.begin_checkpoint, self._manifest(point), point.step)
        self._exposed = max(seconds)
        self.is_writing = True
        self._saved_step = point.step
        return point.step

    def waited(self, seconds: float) -> None:
        """Note for how long an update has waited for the arrays of a save."""
        self._exposed += seconds

    def finish(self) -> None:
        """Wait until the last save is on the disks."""
        if self.is_writing:
            self._exposed += max(self._crew.all(RunWorker.finish_checkpoint))
        self.report()

    def report(self) -> None:
        """Report a checkpoint that was completed since the last call."""
        saved = self._crew.worker.snapshots.take_saved()
        if saved is None:
            return
        self.is_writing = False
        self._run.reporter.say(
            f"step {saved.step}: checkpoint of {gibibytes(saved.nbytes)} written in "
            f"{saved.seconds:.1f} s, for which training waited {self._exposed:.2f} s"
        )
        self._run.reporter.event(
            "checkpoint",
            {
                "step": saved.step,
                "bytes": saved.nbytes,
                "seconds": round(saved.seconds, 3),
                "exposed_seconds": round(self._exposed, 3),
            },
        )

    def _manifest(self, point: Point) -> Manifest:
        """Return the manifest of the checkpoint but for its files."""
        assert self._run.identity is not None, "rank 0 has it"
        plan = self._run.training.plan
        return Manifest(
            step=point.step,
            files=(),
            identity=self._run.identity,
            state=in_json(point.state),
            plan={  # for people to read: any layout can resume it
                **asdict(plan.mesh),
                "schedule": plan.schedule,
                "num_layers": list(plan.stage_map.partition.sizes),
                "backend": self._run.job.cluster.backend,
            },
            versions=package_versions(),
        )
