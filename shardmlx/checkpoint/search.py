"""Let all ranks look for checkpoints: the facts by which rank 0 decides how a run resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardmlx.checkpoint.resume import (
    CheckedVersion,
    CheckpointFacts,
    Resumption,
    SeenDirectory,
)
from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.checkpoint.storage import committers_of
from shardmlx.checkpoint.store import FileInfo, Manifest, Store, name_of, step_of
from shardmlx.config.train import CheckpointOptions
from shardmlx.distributed.crew import Crew
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError


def see_checkpoints(crew: Crew[SeenCheckpoints], options: CheckpointOptions) -> CheckpointFacts:
    """Return the checkpoints that ranks see where a run with these options looks for them, and keep
    other runs out of the directory in which it saves its own. Raises ``UserError``."""
    named = options.named
    if named is not None and step_of(named.name) is None:
        raise UserError(
            f"--resume {named}",
            f"give auto, never, or the directory of a checkpoint, like {name_of(100)}",
        )
    own = None if options.checkpoint_dir is None else _see_own(crew, options)
    if named is None:
        source = None if options.resume == "never" else own
    elif own is not None and _are_one(named.parent, own.store.directory):
        source = own
    else:
        disks = crew.all(SeenCheckpoints.see_disks, named.parent, make=False)[0]
        source = _with_manifests(crew, named.parent, disks)
    if source is not None:
        source = _with_checks(crew, source, None if named is None else step_of(named.name))
    names = tuple(crew.transport.name(rank) for rank in range(crew.size))
    return CheckpointFacts(names=names, own=own, source=source)


def take_place(crew: Crew[SeenCheckpoints], resumption: Resumption) -> None:
    """Leave no directory where nothing is saved, and set checkpoints aside from whose course the
    run departs. Raises ``UserError``."""
    place = resumption.place
    if place is None:
        return
    disks = place.storage.disks
    directory = place.store.directory
    used = [rank for writer in place.storage.writers for rank in disks.groups[disks.of(writer)]]
    crew.all(SeenCheckpoints.remove_if_empty, directory, used)
    after = resumption.superseded_after
    if after is not None:
        crew.all(
            SeenCheckpoints.set_aside, directory, after, disks.leaders, list(resumption.damaged)
        )


def _see_own(crew: Crew[SeenCheckpoints], options: CheckpointOptions) -> SeenDirectory:
    """Return the run's own directory, once no other run writes there."""
    directory = Path(str(options.checkpoint_dir))
    disks = crew.all(SeenCheckpoints.see_disks, directory, make=True)[0]
    committers = committers_of(options.checkpoint_storage, disks)
    able = [rank for rank in committers if disks.problems[rank] is None]
    crew.all(SeenCheckpoints.lock, directory, able)
    return _with_manifests(crew, directory, disks)


def _with_manifests(crew: Crew[SeenCheckpoints], directory: Path, disks: Disks) -> SeenDirectory:
    """Return a directory with the manifests that are there."""
    versions: dict[int, dict[int, Manifest | str]] = {}
    of_ranks = crew.all(SeenCheckpoints.manifests, directory, disks.leaders)
    for rank, theirs in enumerate(of_ranks):
        for step, manifest in theirs.items():
            versions.setdefault(step, {})[disks.of(rank)] = manifest
    return SeenDirectory(Store(directory), disks, versions)


def _with_checks(
    crew: Crew[SeenCheckpoints], seen: SeenDirectory, step: int | None
) -> SeenDirectory:
    """Return the directory, whose checkpoints were read from the newest on until one is sound, or
    that of ``step`` alone. The ranks that see a disk share the reading."""
    checked: list[CheckedVersion] = []
    for candidate in seen.candidates(step):
        for manifest, holders in _by_copies(seen.versions.get(candidate, {})):
            checked.append(_check(crew, seen, manifest, holders))
            if not checked[-1].faults:
                return replace(seen, checked=tuple(checked))
    return replace(seen, checked=tuple(checked))


def _by_copies(versions: Mapping[int, Manifest | str]) -> Iterator[tuple[Manifest, list[int]]]:
    """Yield the manifests of one step, each with the disks that have it.

    A step may exist in several versions: of a run that was set back, on a disk that was away
    meanwhile. The version on most disks comes first: it is the one that was completed last.
    """
    copies: list[tuple[Manifest, list[int]]] = []
    for disk, version in versions.items():
        if isinstance(version, str):
            continue
        known = next((holders for manifest, holders in copies if manifest == version), None)
        if known is None:
            copies.append((version, [disk]))
        else:
            known.append(disk)
    yield from sorted(copies, key=lambda each: len(each[1]), reverse=True)


def _check(
    crew: Crew[SeenCheckpoints],
    seen: SeenDirectory,
    manifest: Manifest,
    holders: Sequence[int],
) -> CheckedVersion:
    """Let the ranks that see these disks read all files of a checkpoint."""
    disks = seen.disks
    shares: list[Sequence[FileInfo]] = [()] * crew.size
    for group in (disks.groups[disk] for disk in holders):
        for place, rank in enumerate(group):
            shares[rank] = manifest.files[place :: len(group)]
    args = [(seen.store.directory, manifest.step, share) for share in shares]
    sound: dict[str, list[int]] = {file.name: [] for file in manifest.files}
    faults: dict[str, list[str]] = {name: [] for name in sound}
    for rank, theirs in enumerate(crew.begin_each(SeenCheckpoints.faults, args).values()):
        for name, fault in theirs.items():
            if fault is None:
                sound[name].append(disks.of(rank))
            else:
                faults[name].append(f"{fault} ({crew.transport.name(rank)})")
    # The damage of a copy says more than its absence from another disk.
    wrong = [
        min(faults[name], key=lambda text: " is missing (" in text)
        for name in sound
        if not sound[name]
    ]
    where = {name: tuple(on_disks) for name, on_disks in sound.items()}
    return CheckedVersion(manifest, where, tuple(wrong))


def _are_one(directory: Path, other: Path) -> bool:
    try:
        return directory.samefile(other)
    except OSError:
        return False
