"""Find out which ranks have the model, and make room on those that do not.

Rank 0 looks first, tells the others what to look for, and decides by their answers how each rank
gets what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import ModelSource
from shardmlx.distributed.crew import Crew
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError
from shardmlx.loading.adapters import find_adapters
from shardmlx.loading.hub_download import find_model, manifest_of, whole_snapshot
from shardmlx.loading.local_files import (
    CopyPlan,
    FoundFiles,
    Holding,
    LocalFiles,
    Wanted,
    open_checked,
    whole_files,
)
from shardmlx.loading.manifest import read_model_manifest
from shardmlx.modelfiles.sources import SUFFIX


def find_model_files(crew: Crew[LocalFiles], source: ModelSource, reporter: Reporter) -> None:
    """Find where each rank reads the model. On rank 0. Raises ``UserError``."""
    model = source.model
    revision = source.revision
    is_here = Path(model).exists()
    if crew.size == 1 or (source.weights == "local" and not is_here):
        # Every rank downloads the whole repository, as mlx-lm does.
        crew.all(LocalFiles.take_whole, model, revision)
        return
    found = _look_first(model, revision)
    commit = None if found.repository is None else found.repository.revision
    wanted = Wanted(model, found.identity, is_here, revision, commit)
    _share(crew, source, reporter, found, wanted)


def find_adapter_files(
    crew: Crew[LocalFiles], source: ModelSource, adapters: str, reporter: Reporter
) -> None:
    """Find where each rank reads ``adapters``, a directory or a safetensors file. On rank 0. Raises
    ``UserError``; building the model reports faults of the adapters themselves."""
    path = Path(adapters)
    is_file = path.suffix == SUFFIX
    directory = path.parent if is_file else path
    found = None
    with suppress(UserError, OSError):
        file = path.name if is_file else find_adapters(directory)[1].name
        found = whole_files(directory, [file])
    if found is None:
        crew.all(LocalFiles.use, path)
        return
    wanted = Wanted(str(directory), found.identity, is_directory=True, file=file)
    of_adapters = replace(source, model=adapters, weight_cache=None)
    _share(crew, of_adapters, reporter, found, wanted)
    if is_file:
        crew.all(LocalFiles.enter, file)


def _look_first(model: str, revision: str | None) -> FoundFiles:
    """Look on rank 0, which must have, or be able to get, everything that others may need."""
    repository = None if Path(model).exists() else open_checked(model, revision)
    if repository is None:
        return whole_files(find_model(model, revision))
    snapshot = whole_snapshot(model, repository.revision)
    manifest = manifest_of(repository)
    holding = Holding.HUB if snapshot is None else Holding.WHOLE
    return FoundFiles(holding, manifest.key, snapshot, repository, manifest)


def _share(
    crew: Crew[LocalFiles],
    source: ModelSource,
    reporter: Reporter,
    found: FoundFiles,
    wanted: Wanted,
) -> None:
    """Hear what each rank has of the files that rank 0 has ``found``, and let copies be made."""
    crew.worker.found = found
    everyone = crew.all(LocalFiles.look, None if source.weights == "rank0" else wanted)
    for rank, theirs in enumerate(everyone):
        name = crew.transport.name(rank)
        if theirs.holding is not Holding.LACKS:
            continue
        if source.weights == "local":
            raise UserError(
                f"{name} lacks the files of {source.model}: {theirs.why}",
                "copy it there, or let the rank have it from rank 0 with --weights auto",
            )
        if theirs.identity:
            reporter.warn(f"{name} is sent {source.model} by rank 0: {theirs.why}")
    holdings = tuple(theirs.holding for theirs in everyone)
    if set(holdings) == {Holding.WHOLE}:
        crew.all(LocalFiles.use_found)
        return
    manifest = found.manifest
    if manifest is None:
        assert found.path is not None, "what is not a repository has a path"
        manifest = read_model_manifest(found.path, found.files, found.identity)
    disks, *_ = crew.all(LocalFiles.see_disks, source.weight_cache)
    plan = CopyPlan(manifest, holdings, keepers_of(holdings, disks), source.weight_cache)
    for rank in sorted(set(plan.keepers)):
        problem = disks.problems[rank]
        if problem is not None and holdings[rank] is not Holding.WHOLE:
            raise UserError(
                f"{crew.transport.name(rank)} cannot keep its part of {source.model}: {problem}",
                "name a directory that it may write to with --weight-cache",
            )
    crew.all(LocalFiles.use_copies, crew.all(LocalFiles.make_copy, plan))


def keepers_of(holdings: Sequence[Holding], disks: Disks) -> tuple[int, ...]:
    """Return the rank that writes for each rank: one on the same disk, preferably with the hub."""
    keepers = list(range(len(holdings)))
    for group in disks.groups:
        writing = [rank for rank in group if holdings[rank] is not Holding.WHOLE]
        for rank in writing:
            keepers[rank] = min(writing, key=lambda each: holdings[each] is not Holding.HUB)
    return tuple(keepers)
