"""Write a run's weights, in one place: it asks whether they are worth more than what is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardmlx.checkpoint.export import Collection, specs_of
from shardmlx.checkpoint.store import MARKER
from shardmlx.common.digests import file_digest
from shardmlx.config.train import BEST
from shardmlx.distributed.crew import Crew
from shardmlx.errors import UserError
from shardmlx.loading.adapters import read_tensors
from shardmlx.loading.manifest import fingerprint
from shardmlx.modelfiles.safetensors_header import INDEX_FILE, MODEL_FILES
from shardmlx.modelfiles.sources import ADAPTER_FILE
from shardmlx.training.run_worker import RunWorker
from shardmlx.training.soundness import Best, Soundness


@dataclass(frozen=True, slots=True)
class Kept:
    """The weights of the best validation on disk: its loss, the step before whose update it was,
    their directory, and a digest of their files."""

    loss: float
    step: int
    place: str
    digest: str | None


class Outputs:
    """The directories of a run's weights, on rank 0."""

    def __init__(self, crew: Crew[RunWorker], soundness: Soundness) -> None:
        self._crew = crew
        self._run = crew.worker.run
        self._options = options = self._run.config
        self._soundness = soundness
        self._path = Path(options.adapter_path)
        self.last = options.last_path
        """Directory of the last weights."""
        self.kept: Kept | None = None

    def save(self, copy_as: str | None = None) -> bool:
        """Write the last weights, with a copy of adapters; return whether it has."""
        return self._write(self.last, copy_as)

    def is_best(self, loss: float | None) -> bool:
        """Tell whether the weights of a validation are to be kept as the best."""
        if self._options.keep != BEST or loss is None or not math.isfinite(loss):
            return False
        return self.kept is None or loss < self.kept.loss

    def keep_best(self, step: int, loss: float) -> None:
        """Write the present weights as the best: those before the update of ``step``."""
        if self._write(self._path, None):
            self.kept = Kept(loss, step, str(self._path), self._digest())

    def say_best(self) -> None:
        """Say where the best weights are, or that none are kept."""
        if self.kept is not None:
            self._run.reporter.say(
                f"The best, before step {self.kept.step}, is in {self.kept.place}"
            )
        elif self._options.keep == BEST:
            self._run.reporter.warn(
                f"no validation has found best weights, and {self._path} was left as it is: the "
                f"last weights are in {self.last}"
            )

    def state(self) -> dict[str, Any] | None:
        """Return what ``restore`` takes, for a checkpoint."""
        if self.kept is None:
            return None
        return asdict(replace(self.kept, place=str(Path(self.kept.place).absolute())))

    def restore(self, state: Mapping[str, Any] | None, best: Best) -> None:
        """Find the best weights that a checkpoint tells of, and say where they are if it is not in
        --adapter-path. Weights that are gone are the best no more. A checkpoint of an older release
        says only which validation was the ``best``."""
        if self._options.keep != BEST:
            return
        if state is not None:
            before = Kept(**state)
        elif best.step is not None and best.loss is not None:
            before = Kept(best.loss, best.step, str(self._path), None)
        else:
            return
        self.kept = self._found(before)
        about = f"The best so far, before step {before.step}"
        if self.kept is None:
            self._run.reporter.warn(
                f"{about}, was in {before.place}, where it is no more: the best of the steps that "
                "follow will be kept"
            )
        elif self.kept.place != str(self._path):
            self._run.reporter.say(f"{about}, is in {self.kept.place}, and stays there")

    def take_best(self) -> bool:
        """Put the best weights into the stages; return whether there are any."""
        kept = self.kept
        if kept is None:
            return False
        files = self._files(Path(kept.place))
        wanted = self._crew.all(RunWorker.wanted_weights)
        tensors = read_tensors(files)
        specs = specs_of({name: tensors[name] for name in sorted(set[str]().union(*wanted))})
        self._crew.all(RunWorker.take_weights, files, specs, wanted)
        return True

    def _write(self, directory: Path, copy_as: str | None) -> bool:
        """Write the present weights, and return whether it has. If none has moved since they were
        loaded, they are untrained, or a checkpoint's, which do not replace what is later."""
        if self._soundness.unmoved() is not None:
            if self._run.resumption.found is None:
                return False
            if self._is_later(directory):
                self._run.reporter.say(
                    f"{directory} has what was saved after this run's checkpoint: it stays. To "
                    "write the checkpoint's weights, name another --adapter-path"
                )
                return False
        collection = Collection.of(self._crew.all(RunWorker.held_weights))
        self._crew.all(RunWorker.save, collection, directory, copy_as)
        return True

    def _is_later(self, directory: Path) -> bool:
        found = self._run.resumption.found
        assert found is not None, "only a run that goes on has a checkpoint"
        marker = found.store.path(found.manifest.step) / MARKER
        since = marker.stat().st_mtime if marker.exists() else 0.0
        files = (directory / name for name in (ADAPTER_FILE, INDEX_FILE))
        return any(file.stat().st_mtime > since for file in files if file.exists())

    def _found(self, before: Kept) -> Kept | None:
        """Return what was kept and where it is now, which may have been moved."""
        for place in (str(self._path), before.place):
            digest = self._digest(Path(place))
            if digest is not None and before.digest in (None, digest):
                return replace(before, place=place, digest=digest)
        return None

    def _files(self, place: Path) -> list[Path]:
        if self._options.tune.is_full:
            return sorted(place.glob(MODEL_FILES))
        return [place / ADAPTER_FILE]

    def _digest(self, place: Path | None = None) -> str | None:
        """Return a digest of the weights in a directory; None if it has none that can be read."""
        place = place or self._path
        try:
            if not self._options.tune.is_full:
                return file_digest(place / ADAPTER_FILE)
            files = [file.name for file in self._files(place)]
            return fingerprint(place, files) if files else None
        except (OSError, UserError):
            return None
