"""The model that is exported: in a directory, or on the hub, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import mlx.core as mx

from shardmlx.compat import sources_of
from shardmlx.conversion.experts import part_name
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.errors import UserError
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
from shardmlx.modelfiles.hub import Repository
from shardmlx.modelfiles.model_files import check_model_files


class Source:
    """A model in ``path``; ``identity`` names its content, ``repository`` its name on the hub."""

    has_files = True
    """False if only those tensors are in ``path`` that were brought so far."""

    largest = 0
    """Limit of the bytes of disk space that the model takes meanwhile."""

    def __init__(self, path: Path, identity: str, repository: str | None = None) -> None:
        self.path = path
        self.identity = identity
        self.repository = repository

    def watch(self, model: LazyModel) -> None:
        """Learn from which tensors each weight of the model is computed."""

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

    def watch(self, model: LazyModel) -> None:
        """Learn from which tensors each weight of the model is computed."""
        self._unread = {name: each for name, each in model.read.items() if name in self._tensors}
        names = list(self._unread)
        computed = list(_computed(model))
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
        self._copy.close()


def _computed(model: LazyModel) -> Iterator[tuple[str, mx.array]]:
    """Yield lazy arrays with the names of their results: a weight or an expert."""
    for name, array in model.weights.items():
        if name not in model.experts:
            yield name, array
    for experts in {each.path: each for each in model.experts.values()}.values():
        for number in range(experts.count):
            for leaf in experts.leaves(number):
                yield part_name(experts.path, number), leaf


@contextmanager
def open_source(model: str, revision: str | None, room: Path) -> Iterator[Source]:
    """Open a model here, cached or on the hub, with tensors in ``room``. Raises ``UserError``."""
    path = Path(model)
    if path.is_file():
        raise UserError(f"{model} is a file", "name the directory that holds config.json")
    repository = None if path.exists() else open_repository(model, revision)
    if repository is None:
        yield _in_directory(find_model(model, revision))
        return
    snapshot = whole_snapshot(model, repository.revision)
    if snapshot is not None:
        yield _in_directory(snapshot, repository.name)
        return
    with closing(OnHub(repository, manifest_of(repository), room)) as source:
        yield source


def _in_directory(path: Path, repository: str | None = None) -> Source:
    files = sorted({file.name for file in check_model_files(path).values()})
    return Source(path, fingerprint(path, files), repository)
