"""Download models from the hub: whole, or tensor by tensor into a copy. No MLX, no MPI."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatchcase
from pathlib import Path

from shardmlx.loading.manifest import TEXTS, ModelManifest
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.modelfiles.hub import (
    Repository,
    Unreachable,
    find_repository,
    hub_errors,
    no_directory,
)
from shardmlx.modelfiles.model_files import directory_of, read_model, sound
from shardmlx.modelfiles.safetensors_header import PlacedTensor
from shardmlx.modelfiles.sources import SUFFIX, Directory

FILES_TO_DOWNLOAD = ("*.json", "model*.safetensors", "tokenizer.model", "*.jinja", "*.txt")

_CONNECTIONS = 8
_RUN_BYTES = 1 << 26
"""Tensors that lie side by side come in one request up to this size; larger ones alone."""


def runs(names: Collection[str], tensors: Mapping[str, PlacedTensor]) -> list[list[str]]:
    """Return the fewest requests that bring exactly these tensors: names that lie side by side."""
    found: list[list[str]] = []
    for name in sorted(names, key=lambda name: (tensors[name].file, tensors[name].start)):
        here = tensors[name]
        if found:
            first = tensors[found[-1][0]]
            last = tensors[found[-1][-1]]
            is_next = (last.file, last.end) == (here.file, here.start)
            if is_next and here.end - first.start <= _RUN_BYTES:
                found[-1].append(name)
                continue
        found.append([name])
    return found


def download(
    repository: Repository,
    copy: PartialCopy,
    names: Collection[str],
    tensors: Mapping[str, PlacedTensor],
    advance: Callable[[int], None],
) -> None:
    """Bring tensors into ``copy``; ``advance`` gets bytes as they come. Raises ``UserError``."""

    def bring(run: Sequence[str]) -> Sequence[str]:
        file = tensors[run[0]].file
        position = tensors[run[0]].start
        for chunk in repository.stream(file, position, tensors[run[-1]].end):
            copy.write(file, position, chunk)
            position += len(chunk)
        return run

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        try:
            for done in as_completed([pool.submit(bring, run) for run in runs(names, tensors)]):
                for name in done.result():
                    copy.add(name)
                    advance(tensors[name].nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            copy.flush()  # keep finished tensors for the next attempt
            raise
    copy.flush()


def find_model(model: str, revision: str | None) -> Path:
    """Return a model's directory, downloaded at ``revision`` if need be. Raises ``UserError``."""
    if (path := directory_of(model, revision)) is not None:
        return path
    from huggingface_hub import snapshot_download

    try:
        with hub_errors(model, revision):
            patterns = list(FILES_TO_DOWNLOAD)
            return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Unreachable as error:
        raise no_directory(model, error) from None


def open_repository(name: str, revision: str | None = None) -> Repository | None:
    """Open a repository; None if only its cache can be asked. Raises ``UserError``."""
    source = find_repository(name, revision)
    return source if isinstance(source, Repository) else None


def whole_snapshot(name: str, commit: str | None) -> Path | None:
    """Return huggingface-hub's snapshot of a commit, if it has all of the model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = snapshot_download(
            name, revision=commit, allow_patterns=list(FILES_TO_DOWNLOAD), local_files_only=True
        )
        files = read_model(Directory(Path(path)))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return Path(path) if files.tensors and files.config and not files.faults else None


def fetch_small_files(repository: Repository, directory: Path) -> None:
    """Fetch the tokenizer, and all other files but weights."""
    for file in repository.files:
        is_wanted = any(fnmatchcase(file, pattern) for pattern in FILES_TO_DOWNLOAD)
        if is_wanted and "/" not in file and not file.endswith(SUFFIX):
            (directory / file).write_bytes(repository.read(file))


def manifest_of(repository: Repository) -> ModelManifest:
    """Return the beginning of a copy of a repository. Raises ``UserError``."""
    headers = sound(repository).headers
    digest = hashlib.sha256(f"{repository.name}@{repository.revision}".encode())
    for file in sorted(headers):
        digest.update(f" {file} ".encode() + headers[file].head)
    texts = {name: repository.read(name) for name in TEXTS if name in repository.files}
    return ModelManifest(digest.hexdigest(), texts, headers)
