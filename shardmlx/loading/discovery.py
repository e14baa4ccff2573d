"""Finds out which ranks have the model, and makes room on those that do not. All collective."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shardmlx.common.environment import cache_directory
from shardmlx.common.reporter import Reporter
from shardmlx.distributed.agreement import AgreedError, on_all_ranks, on_rank_0
from shardmlx.distributed.shared_disks import Disks, find_disks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError, one_line
from shardmlx.loading.build import FILES_TO_DOWNLOAD, find_model
from shardmlx.loading.hub_download import download_whole, open_repository, whole_snapshot
from shardmlx.loading.manifest import TEXTS, ModelManifest, fingerprint, read_model_manifest
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.loading.transfer import Bundle, Layout, State, Weights
from shardmlx.modelfiles.hub import NoRanges, Repository
from shardmlx.modelfiles.model_files import read_model
from shardmlx.modelfiles.safetensors_header import MODEL_FILES
from shardmlx.modelfiles.sources import ADAPTER_FILE, SUFFIX

_LOOKING = "looking for the model"
_NOT_ASKED = "--weights rank0"


@dataclass(frozen=True, slots=True)
class _Found:
    """What a rank has. ``why`` says why it lacks it. ``identity`` names the content."""

    state: State
    identity: str = ""
    path: Path | None = None
    commit: str | None = None
    repository: Repository | None = None
    blueprint: ModelManifest | None = None
    files: Sequence[str] = ()
    why: str = ""


def find_weights(
    transport: Transport,
    reporter: Reporter,
    model: str,
    *,
    mode: str,
    cache: str | None,
    adapters: str | None = None,
) -> Weights:
    """Where each rank reads ``model`` and its ``adapters``, a directory or a safetensors file.

    ``mode`` is --weights, ``cache`` the directory in which what a rank lacks is kept for
    later runs. Raises ``AgreedError``.
    """
    bundle = _find_model(transport, reporter, model, mode, cache)
    if not adapters:
        return Weights(bundle, None)
    try:
        return Weights(bundle, _find_adapters(transport, reporter, adapters, mode))
    except BaseException:
        bundle.close()
        raise


def _find_model(
    transport: Transport, reporter: Reporter, model: str, mode: str, cache: str | None
) -> Bundle:
    is_here = transport.broadcast(Path(model).exists(), what=_LOOKING)
    if transport.size == 1 or (mode == "local" and not is_here):
        # From the hub every rank gets all, as mlx-lm does.
        return Bundle(transport, on_all_ranks(transport, _LOOKING, lambda: find_model(model)))
    first = on_rank_0(transport, _LOOKING, lambda: _look_first(model))
    identity, commit = transport.broadcast(first and (first.identity, first.commit), what=_LOOKING)
    found = first
    if found is None and mode == "rank0":
        found = _Found(State.LACKS, why=_NOT_ASKED)
    if found is None:
        found = _look(model, is_here, identity, commit)
    return _settle(transport, reporter, found, f"--model {model}", mode, cache)


def _look_first(model: str) -> _Found:
    """On rank 0, who must have all that others may need, or be able to get it."""
    repository = None if Path(model).exists() else _open(model)
    if repository is None:
        return _whole(find_model(model))
    snapshot = whole_snapshot(model, repository.revision, FILES_TO_DOWNLOAD)
    try:
        blueprint = _blueprint_of(repository)
    except NoRanges:
        return _whole(snapshot or download_whole(repository, FILES_TO_DOWNLOAD))
    return _Found(
        State.HUB if snapshot is None else State.WHOLE,
        blueprint.key,
        snapshot,
        repository.revision,
        repository,
        blueprint,
    )


def _open(model: str) -> Repository | None:
    """None where ``find_model`` has to say why, or finds what huggingface-hub has."""
    try:
        repository = open_repository(model)
    except UserError:
        return None
    return repository if repository is not None and repository.revision is not None else None


def _whole(path: Path) -> _Found:
    files = _weight_files(path)
    return _Found(State.WHOLE, fingerprint(path, files), path, files=files)


def _look(model: str, is_directory: bool, identity: str, commit: str | None) -> _Found:
    """On the other ranks: what rank 0 has found may be here, or to be had, too."""
    try:
        if is_directory:
            return _look_here(Path(model), _weight_files(Path(model)), identity)
        snapshot = whole_snapshot(model, commit, FILES_TO_DOWNLOAD)
        if commit is None:
            if snapshot is None:
                return _Found(State.LACKS, why="the hub does not give it")
            return _look_here(snapshot, _weight_files(snapshot), identity)
        if snapshot is not None:
            return _Found(State.WHOLE, identity, snapshot, commit)
        repository = open_repository(model, commit)
    except (UserError, OSError) as error:
        return _Found(State.LACKS, why=one_line(error))
    if repository is None:
        return _Found(State.LACKS, why="the hub does not answer")
    return _Found(State.HUB, identity, None, commit, repository)


def _look_here(directory: Path, files: Sequence[str], identity: str) -> _Found:
    if not files:
        return _Found(State.LACKS, why=f"{directory} is not there, or has no weights")
    own = fingerprint(directory, files)
    if own != identity:
        return _Found(State.LACKS, own, why=f"what is in {directory} differs from rank 0's")
    return _Found(State.WHOLE, own, directory)


def _find_adapters(transport: Transport, reporter: Reporter, name: str, mode: str) -> Bundle:
    path = Path(name)
    is_file = path.suffix == SUFFIX
    directory = path.parent if is_file else path
    files = [path.name] if is_file else [ADAPTER_FILE]
    here = Bundle(transport, path)
    if transport.size == 1:
        return here
    what = "looking for the adapters"

    def look_first() -> _Found | None:
        try:
            return _Found(State.WHOLE, fingerprint(directory, files), directory, files=files)
        except (UserError, OSError):
            return None  # whoever builds the model says what is wrong with them

    found = on_rank_0(transport, what, look_first)
    identity = transport.broadcast(found and found.identity, what=what)
    if identity is None:
        return here
    if transport.rank != 0:
        found = _Found(State.LACKS, why=_NOT_ASKED)
        if mode != "rank0":
            try:
                there = [file for file in files if (directory / file).is_file()]
                found = _look_here(directory, there, identity)
            except (UserError, OSError) as error:
                found = _Found(State.LACKS, why=one_line(error))
    bundle = _settle(transport, reporter, found or _Found(State.LACKS), name, mode, None)
    if is_file:
        bundle.path /= path.name
    return bundle


def _settle(
    transport: Transport,
    reporter: Reporter,
    found: _Found,
    name: str,
    mode: str,
    cache: str | None,
) -> Bundle:
    """Agree on who has what, and make the copies."""
    everyone = transport.all_gather((found.state, found.identity, found.why), _LOOKING)
    states = tuple(state for state, _, _ in everyone)
    lacking = [rank for rank, state in enumerate(states) if state is State.LACKS]
    if lacking and mode == "local":
        rank = lacking[0]
        raise AgreedError(
            f"{transport.name(rank)} lacks {name}: {everyone[rank][2]}: copy it there, or let the "
            "rank have it from rank 0 with --weights auto"
        )
    if all(state is State.WHOLE for state in states) and found.path is not None:
        return Bundle(transport, found.path)
    for rank in lacking:
        if everyone[rank][1]:
            reporter.warn(f"{transport.name(rank)} is sent {name} by rank 0: {everyone[rank][2]}")
    blueprint: ModelManifest = transport.broadcast(
        on_rank_0(transport, _LOOKING, lambda: _blueprint(found)), what=_LOOKING
    )
    base, kept = _base(found.state, cache)
    disks = find_disks(transport, base, make=kept)
    keepers = _keepers(states, disks)
    for rank in sorted({*keepers} - {r for r, s in enumerate(states) if s is State.WHOLE}):
        if disks.problems[rank] is not None:
            raise AgreedError(
                f"{transport.name(rank)} cannot keep its part of {name}: {disks.problems[rank]}: "
                "name a directory that it may write to with --weight-cache"
            )
    layout = Layout(states, keepers, blueprint)
    copy: PartialCopy | None = None

    def make() -> None:
        nonlocal copy
        if found.state is not State.WHOLE and keepers[transport.rank] == transport.rank:
            directory = base / blueprint.key if kept else Path(_new_directory(base))
            copy = PartialCopy(directory, blueprint, kept=kept)
            if transport.rank == 0 and found.repository is not None:
                _fetch_small_files(found.repository, directory)

    try:
        on_all_ranks(transport, "making room for the weights", make)
        places = transport.all_gather(None if copy is None else str(copy.directory), _LOOKING)
        place = found.path or Path(places[keepers[transport.rank]])
        return Bundle(
            transport,
            place,
            layout,
            copy=copy,
            repository=found.repository if found.state is State.HUB else None,
            temporary=not kept,
        )
    except BaseException:
        if copy is not None:
            copy.close()
            if not kept:
                shutil.rmtree(copy.directory, ignore_errors=True)
        raise


def _keepers(states: Sequence[State], disks: Disks) -> tuple[int, ...]:
    """Of those that see the same disk one writes, rather one that can ask the hub."""
    keepers = list(range(len(states)))
    for group in disks.groups:
        writing = [
            *(rank for rank in group if states[rank] is State.HUB),
            *(rank for rank in group if states[rank] is State.LACKS),
        ]
        for rank in writing:
            keepers[rank] = writing[0]
    return tuple(keepers)


def _base(state: State, cache: str | None) -> tuple[Path, bool]:
    """Where a rank keeps its copy, and whether for later runs too."""
    if state is State.WHOLE or (cache is None and state is State.LACKS):
        return Path(tempfile.gettempdir()), False
    if cache is not None:
        return Path(cache).expanduser().absolute(), True
    # What came from far away is not fetched twice.
    return cache_directory("weights"), True


def _new_directory(base: Path) -> str:
    try:
        return tempfile.mkdtemp(prefix="shardmlx-weights-", dir=base)
    except OSError as error:
        raise UserError(
            f"cannot write to {base}: {error.strerror or error}: set TMPDIR, or name a directory "
            "with --weight-cache"
        ) from None


def _blueprint(found: _Found) -> ModelManifest:
    if found.blueprint is not None or found.path is None:
        return found.blueprint  # type: ignore[return-value]  # of a repository there is one
    return read_model_manifest(found.path, found.files, found.identity)


def _weight_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob(MODEL_FILES))


def _blueprint_of(repository: Repository) -> ModelManifest:
    """What a copy of a repository begins with. ``UserError``, ``NoRanges``."""
    files = read_model(repository)
    if files.faults:
        raise UserError(files.faults[0])
    heads = {file: repository.head(file, header) for file, header in files.headers.items()}
    digest = hashlib.sha256(f"{repository.name}@{repository.revision}".encode())
    for file in sorted(heads):
        digest.update(f" {file} {files.checksums.get(file)} ".encode() + heads[file])
    texts = {name: repository.read(name) for name in TEXTS if name in repository.files}
    sizes = {file: header.file_size for file, header in files.headers.items()}
    return ModelManifest(digest.hexdigest(), texts, heads, sizes)


def _fetch_small_files(repository: Repository, directory: Path) -> None:
    """The tokenizer, and what else is no weight."""
    for file in repository.files:
        is_wanted = any(fnmatchcase(file, pattern) for pattern in FILES_TO_DOWNLOAD)
        if is_wanted and "/" not in file and not file.endswith(SUFFIX):
            (directory / file).write_bytes(repository.read(file))
