"""The model to export, in a directory or on the hub, tensor by tensor; and training results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardmlx.checkpoint.store import MANIFEST, Store, step_of
from shardmlx.common.digests import bytes_digest
from shardmlx.compat import sources_of
from shardmlx.errors import UserError
from shardmlx.loading.adapters import find_adapters
from shardmlx.loading.hub_download import (
    download,
    fetch_small_files,
    find_model,
    manifest_of,
    open_repository,
    whole_snapshot,
)
from shardmlx.loading.manifest import ModelManifest, fingerprint
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.loading.peft import PEFT_FILE, PICKLED
from shardmlx.modelfiles.hub import Repository
from shardmlx.modelfiles.model_files import check_model_files, directory_of
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE

_WEIGHTS = "weights-"


@dataclass
class Source:
    """A model in ``path``; ``identity`` names its content, ``repository`` its name on the hub."""

    path: Path
    identity: str
    repository: str | None = None

    has_files = True
    """False if only those tensors are in ``path`` that were brought so far."""

    largest = 0
    """Limit of the bytes of disk space that the model takes meanwhile."""

    def watch(self, read: Mapping[str, mx.array], computed: Iterable[tuple[str, mx.array]]) -> None:
        """Learn from which of the ``read`` tensors each weight of the model is ``computed``."""

    def bring(self, name: str) -> None:
        """Wait until all inputs of a weight, or an expert, can be read. Raises ``UserError``."""


class OnHub(Source):
    """A model with one tensor at a time on the disk, in files that are otherwise holes."""

    has_files = False

    def __init__(self, repository: Repository, manifest: ModelManifest, path: Path) -> None:
        super().__init__(path, manifest.key, repository.name)
        self._hub = repository
        self._tensors = manifest.tensors()
        self.largest = max((place.nbytes for place in self._tensors.values()), default=0)
        self._copy = PartialCopy(path, manifest, kept=False, option="-o")
        fetch_small_files(repository, path)
        self._needed: dict[str, list[str]] = {}
        self._unread: dict[str, mx.array] = {}

    def watch(self, read: Mapping[str, mx.array], computed: Iterable[tuple[str, mx.array]]) -> None:
        """Learn from which of the ``read`` tensors each weight of the model is ``computed``."""
        self._unread = {name: each for name, each in read.items() if name in self._tensors}
        names = list(self._unread)
        computed = list(computed)
        found = sources_of([array for _, array in computed], list(self._unread.values()))
        for (weight, _), numbers in zip(computed, found, strict=True):
            self._needed.setdefault(weight, []).extend(names[each] for each in sorted(numbers))

    def bring(self, name: str) -> None:
        """Fetch the inputs of a weight into memory; nothing stays on the disk."""
        for source in self._needed[name]:
            array = self._unread.pop(source, None)
            if array is None:
                continue  # read before, and still held by its users
            download(self._hub, self._copy, [source], self._tensors, lambda nbytes: None)
            mx.eval(array)
            self._copy.empty()

    def close(self) -> None:
        """Remove the copy, if one was made."""
        self._copy.close()


@contextmanager
def open_source(model: str, revision: str | None, room: Path) -> Iterator[Source]:
    """Open a model here, cached or on the hub, with tensors in ``room``. Raises ``UserError``."""
    here = directory_of(model, revision)
    repository = None if here is not None else open_repository(model, revision)
    if repository is None:
        yield in_directory(find_model(model, revision))
        return
    snapshot = whole_snapshot(model, repository.revision)
    if snapshot is not None:
        yield in_directory(snapshot, repository.name)
        return
    with closing(OnHub(repository, manifest_of(repository), room)) as source:
        yield source


def in_directory(path: Path, repository: str | None = None) -> Source:
    """Return the model in a directory, a copy of a ``repository`` or not. Raises ``UserError``."""
    files = sorted({file.name for file in check_model_files(path).values()})
    return Source(path, fingerprint(path, files), repository)


@dataclass(frozen=True, slots=True)
class Trained:
    """A run's result: its tensors, described by ``config`` as by adapter_config.json."""

    name: str
    identity: str
    config: Mapping[str, Any]
    files: tuple[Path, ...]


def find_trained(name: str) -> Trained:
    """Find adapters, or the (newest) checkpoint of a directory. Raises ``UserError``."""
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"--adapter-path {name} is not a directory", "name that of a finished run")
    has_tensors = any((path / file).is_file() for file in (ADAPTER_FILE, PEFT_FILE, PICKLED))
    if has_tensors and (path / ADAPTER_CONFIG_FILE).is_file():
        config, file = find_adapters(path)
        return Trained(name, fingerprint(path, [file.name]), config, (file,))
    if (step := step_of(path.absolute().name)) is not None and (path / MANIFEST).is_file():
        return _of_checkpoint(name, Store(path.absolute().parent), step)
    if steps := Store(path).steps():
        return _of_checkpoint(name, Store(path), steps[-1])
    if (path / CONFIG_FILE).is_file():
        raise UserError(
            f"--adapter-path {name} is a whole model", "name it as the MODEL to export, and no more"
        )
    raise UserError(
        f"--adapter-path {name} has no {ADAPTER_FILE} with its {ADAPTER_CONFIG_FILE}, and no "
        "complete checkpoint",
        "name the directory that train wrote",
    )


def _of_checkpoint(name: str, store: Store, step: int) -> Trained:
    manifest = store.manifest(step)
    files = [file for file in manifest.files if file.name.startswith(_WEIGHTS)]
    for file in files:
        if fault := store.fault(step, file):
            raise UserError(
                fault, "copy the checkpoint here whole, from every machine that has a part of it"
            )
    made_with = manifest.identity.get("options", {})
    described_by = ("fine_tune_type", "num_layers", "lora_parameters")
    if not made_with.keys() >= {*described_by}:
        raise UserError(f"{store.path(step)} does not say how it was trained")
    return Trained(
        name,
        bytes_digest(manifest.to_json()),
        {key: made_with[key] for key in described_by},
        tuple(store.path(step) / file.name for file in files),
    )
