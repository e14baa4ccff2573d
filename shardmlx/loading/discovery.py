"""Find out which ranks have the model, and make room on those that do not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.common.environment import cache_directory
from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import ModelSource
from shardmlx.distributed.agreement import AgreedError, from_rank_0, on_all_ranks, on_rank_0
from shardmlx.distributed.shared_disks import Disks, find_disks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError, one_line
from shardmlx.loading.hub_download import (
    fetch_small_files,
    find_model,
    manifest_of,
    open_repository,
    whole_snapshot,
)
from shardmlx.loading.manifest import ModelManifest, fingerprint, read_model_manifest
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.loading.transfer import Holding, LocalFiles
from shardmlx.modelfiles.hub import Repository
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.published_packing import check_packing
from shardmlx.modelfiles.safetensors_header import MODEL_FILES, check_weights
from shardmlx.modelfiles.sources import ADAPTER_FILE, CONFIG_FILE, SUFFIX
from shardmlx.models.config_reader import check_layout, read_config

_LOOKING = "looking for the model"


@dataclass(frozen=True, slots=True)
class _LocalModel:
    """A rank's model or adapters. ``identity`` names the content; ``why`` is why it is missing."""

    holding: Holding
    identity: str = ""
    path: Path | None = None
    repository: Repository | None = None
    manifest: ModelManifest | None = None
    files: Sequence[str] = ()
    why: str = ""


def find_weights(
    transport: Transport, reporter: Reporter, source: ModelSource, adapters: str | None = None
) -> LocalFiles:
    """Find where each rank reads the model and its ``adapters``, a directory or a safetensors file.
    All ranks must call it. Raises ``AgreedError``."""
    model, revision = source.model, source.revision
    is_here = transport.broadcast(Path(model).exists(), what=_LOOKING)
    if transport.size == 1 or (source.weights == "local" and not is_here):
        # Every rank downloads the whole repository, as mlx-lm does.
        path = on_all_ranks(transport, _LOOKING, lambda: _checked(model, revision))
        files = LocalFiles(transport, path)
    else:
        files = _share(
            transport,
            reporter,
            source,
            Path(model),
            lambda: _look_first(model, revision),
            lambda identity, commit: _look(model, revision, is_here, identity, commit),
        )
    if adapters:
        try:
            of_adapters = replace(source, model=adapters, weight_cache=None)
            files.additions = _find_adapters(transport, reporter, of_adapters)
        except BaseException:
            files.close()
            raise
    return files


def _checked(model: str, revision: str | None) -> Path:
    """Find a model, and download missing files once its config.json says that it can run."""
    if not Path(model).exists():
        _open(model, revision)
    return find_model(model, revision)


def _look_first(model: str, revision: str | None) -> _LocalModel:
    """Look on rank 0, which must have, or be able to get, everything that others may need."""
    repository = None if Path(model).exists() else _open(model, revision)
    if repository is None:
        return _whole(find_model(model, revision))
    snapshot = whole_snapshot(model, repository.revision)
    manifest = manifest_of(repository)
    holding = Holding.HUB if snapshot is None else Holding.WHOLE
    return _LocalModel(holding, manifest.key, snapshot, repository, manifest)


def _open(model: str, revision: str | None) -> Repository | None:
    """Open a repository that can run, or ``UserError``; None if ``find_model`` shall see to it."""
    try:
        repository = open_repository(model, revision)
    except UserError:
        return None
    if repository is None or repository.revision is None:
        return None
    check_layout(repository.name, repository.files)
    if CONFIG_FILE in repository.files:
        check_weights(repository.name, repository.files)
        config = read_config(repository.fetch(CONFIG_FILE).parent)
        check_packing(config, read_shape(config))
    return repository


def _whole(path: Path, files: Sequence[str] | None = None) -> _LocalModel:
    if files is None:
        files = sorted(file.name for file in path.glob(MODEL_FILES))
    return _LocalModel(Holding.WHOLE, fingerprint(path, files), path, files=files)


def _look(
    model: str, revision: str | None, is_directory: bool, identity: str, commit: str | None
) -> _LocalModel:
    """Look on another rank for rank 0's model, here or on the hub."""
    if is_directory:
        return _same(_whole(Path(model)), identity)
    snapshot = whole_snapshot(model, commit or revision)
    if commit is None and snapshot is not None:
        return _same(_whole(snapshot), identity)
    if snapshot is not None:
        return _LocalModel(Holding.WHOLE, identity, snapshot)
    repository = None if commit is None else open_repository(model, commit)
    if repository is None:
        return _LocalModel(Holding.LACKS)
    return _LocalModel(Holding.HUB, identity, None, repository)


def _same(own: _LocalModel, identity: str) -> _LocalModel:
    """Return a rank's ``own`` files if they are those of rank 0."""
    if not own.files:
        return _LocalModel(Holding.LACKS, why=f"{own.path} is not there, or has no weights")
    if own.identity != identity:
        why = f"what is in {own.path} differs from rank 0's"
        return _LocalModel(Holding.LACKS, own.identity, why=why)
    return own


def _find_adapters(transport: Transport, reporter: Reporter, source: ModelSource) -> LocalFiles:
    path = Path(source.model)
    is_file = path.suffix == SUFFIX
    directory = path.parent if is_file else path
    file = path.name if is_file else ADAPTER_FILE

    def look_first() -> _LocalModel | None:
        with suppress(UserError, OSError):  # building the model reports their fault
            return _whole(directory, [file])
        return None

    def look(identity: str, commit: str | None) -> _LocalModel:
        there = [file] if (directory / file).is_file() else []
        return _same(_whole(directory, there), identity)

    files = _share(transport, reporter, source, directory, look_first, look)
    if is_file:
        files.path /= path.name
    return files


def _share(
    transport: Transport,
    reporter: Reporter,
    source: ModelSource,
    here: Path,
    look_first: Callable[[], _LocalModel | None],
    look: Callable[[str, str | None], _LocalModel],
) -> LocalFiles:
    """Find files on all ranks, agree on the parts that each has, and make the copies.

    ``look_first`` finds them on rank 0; it returns None if they are in ``here``, and building the
    model reports their faults. ``look`` finds those of an identity and a commit elsewhere."""
    found = on_rank_0(transport, _LOOKING, look_first)
    commit = found and found.repository and found.repository.revision
    known = transport.broadcast(found and (found.identity, commit), what=_LOOKING)
    if known is None:
        return LocalFiles(transport, here)
    if found is None:
        found = _LocalModel(Holding.LACKS)
        if source.weights != "rank0":
            try:
                found = look(*known)
            except (UserError, OSError) as error:
                found = _LocalModel(Holding.LACKS, why=one_line(error))
    everyone = transport.all_gather((found.holding, found.identity, found.why), _LOOKING)
    holdings = tuple(holding for holding, _, _ in everyone)
    for rank, (holding, identity, why) in enumerate(everyone):
        if holding is Holding.LACKS and source.weights == "local":
            raise AgreedError(
                f"{transport.name(rank)} lacks the files of {source.model}: {why}",
                "copy it there, or let the rank have it from rank 0 with --weights auto",
            )
        if holding is Holding.LACKS and identity:
            reporter.warn(f"{transport.name(rank)} is sent {source.model} by rank 0: {why}")
    if found.path is not None and set(holdings) == {Holding.WHOLE}:
        return LocalFiles(transport, found.path)
    manifest = from_rank_0(transport, _LOOKING, lambda: _manifest(found))
    # A rank's copy stays for later runs if that is asked for, or if it was downloaded.
    cache, base = source.weight_cache, Path(tempfile.gettempdir())
    asked = cache is not None and found.holding is Holding.LACKS
    kept = asked or found.holding is Holding.HUB
    if kept:
        base = cache_directory("weights") if cache is None else Path(cache).absolute()
    disks = find_disks(transport, base, make=kept)
    keepers = _keepers(holdings, disks)
    for rank in sorted(set(keepers)):
        problem = disks.problems[rank]
        if problem is not None and holdings[rank] is not Holding.WHOLE:
            raise AgreedError(
                f"{transport.name(rank)} cannot keep its part of {source.model}: {problem}",
                "name a directory that it may write to with --weight-cache",
            )
    files = LocalFiles(transport, Path(), manifest, holdings, keepers, temporary=not kept)
    _make_copies(files, found, manifest, base)
    return files


def _manifest(found: _LocalModel) -> ModelManifest:
    if found.manifest is not None or found.path is None:
        return found.manifest  # type: ignore[return-value]  # a repository has one
    return read_model_manifest(found.path, found.files, found.identity)


def _make_copies(
    files: LocalFiles, found: _LocalModel, manifest: ModelManifest, base: Path
) -> None:
    """Make this rank's copy, if it keeps one, and find its keeper's. All ranks must call it."""
    transport, kept = files.transport, not files.temporary
    keeper = files.keepers[transport.rank]
    with ExitStack() as on_failure:

        def make() -> PartialCopy | None:
            if found.holding is Holding.WHOLE or keeper != transport.rank:
                return None
            directory = base / manifest.key
            if not kept:
                directory = Path(tempfile.mkdtemp(prefix="shardmlx-weights-", dir=base))
                on_failure.callback(shutil.rmtree, directory, ignore_errors=True)
            copy = PartialCopy(directory, manifest, kept=kept)
            on_failure.callback(copy.close)
            if transport.rank == 0 and found.repository is not None:
                fetch_small_files(found.repository, directory)
            return copy

        files.copy = on_all_ranks(transport, "making room for the weights", make)
        mine = None if files.copy is None else str(files.copy.directory)
        places = transport.all_gather(mine, _LOOKING)
        on_failure.pop_all()
    files.path = found.path or Path(places[keeper])
    files.repository = found.repository if found.holding is Holding.HUB else None


def _keepers(holdings: Sequence[Holding], disks: Disks) -> tuple[int, ...]:
    """Return the rank that writes for each rank: one on the same disk, preferably with the hub."""
    keepers = list(range(len(holdings)))
    for group in disks.groups:
        writing = [rank for rank in group if holdings[rank] is not Holding.WHOLE]
        for rank in writing:
            keepers[rank] = min(writing, key=lambda each: holdings[each] is not Holding.HUB)
    return tuple(keepers)
