"""Find the place of a run's checkpoints, and the checkpoint to resume, before anything loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmlx.checkpoint.reader import SoundCheckpoint, find_checkpoint
from shardmlx.checkpoint.run_identity import check_identity
from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.checkpoint.store import MARKER, Store, name_of, step_of
from shardmlx.common.reporter import Reporter
from shardmlx.config.train import CheckpointOptions
from shardmlx.distributed.crew import Crew
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError


@dataclass(frozen=True, slots=True)
class Storage:
    """The disks for the parts of ranks 0 to ``owners`` - 1: ``shared`` (each rank writes its part
    to the disk that all see), ``rank0`` (rank 0 writes all) or ``neighbour`` (each rank writes its
    part, and a rank of another disk a copy)."""

    kind: str
    disks: Disks
    owners: int

    def homes(self, owner: int) -> tuple[int, ...]:
        """Return the ranks that write the part of rank ``owner``."""
        if self.kind == "rank0":
            return (0,)
        if self.kind == "shared":
            return (owner,)
        groups = self.disks.groups
        return (owner, groups[(self.disks.of(owner) + 1) % len(groups)][0])

    @property
    def writers(self) -> frozenset[int]:
        """Ranks that write some part."""
        return frozenset(home for owner in range(self.owners) for home in self.homes(owner))

    @property
    def committers(self) -> tuple[int, ...]:
        """Ranks that complete a checkpoint, each on its disk."""
        if self.kind != "neighbour":
            return (0,)
        return self.disks.leaders


def choose_storage(wanted: str, disks: Disks, owners: int, names: Sequence[str]) -> Storage:
    """Choose the storage for ranks 0 to ``owners`` - 1, called ``names``; ``wanted`` may be auto.
    Raises ``UserError`` if one of them cannot write its part."""
    shared = len(disks.groups) == 1
    kind = wanted
    if wanted == "auto":
        # Without a common disk, rank 0 keeps the only copy, on the machine that users look after.
        kind = "shared" if shared and not any(disks.problems[:owners]) else "rank0"
    elif wanted == "neighbour" and shared:
        kind = "shared"
    elif wanted == "shared" and not shared:
        away = names[disks.groups[1][0]]
        raise UserError(
            f"checkpoint_storage is shared: {away} does not see the --checkpoint-dir of {names[0]}",
            "name a directory on a disk that both have, or use auto",
        )
    storage = Storage(kind, disks, owners)
    for rank in sorted(storage.writers.union(storage.committers)):
        if disks.problems[rank] is not None:
            remedy = ", or use checkpoint_storage: rank0" if disks.problems[0] is None else ""
            raise UserError(
                f"{names[rank]} cannot write to --checkpoint-dir: {disks.problems[rank]}: name "
                f"another directory{remedy}"
            )
    return storage


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a run's checkpoints."""

    store: Store
    storage: Storage


@dataclass(frozen=True, slots=True)
class Resumption:
    """The start of a run: saves nothing without a ``place``, starts anew without ``found``."""

    place: Place | None = None
    found: SoundCheckpoint | None = None


def prepare_resumption(
    crew: Crew[SeenCheckpoints],
    options: CheckpointOptions,
    iters: int,
    reporter: Reporter,
    identity: Mapping[str, Any] | None,
    owners: int,
) -> Resumption:
    """Find where the run saves its checkpoints, and the one that it goes on from: never a damaged
    one, or one of another ``identity``; auto skips damaged ones, with a warning. On rank 0. Raises
    ``UserError``."""
    resume = options.named
    if resume is not None and step_of(resume.name) is None:
        raise UserError(
            f"--resume {resume}",
            f"give auto, never, or the directory of a checkpoint, like {name_of(100)}",
        )
    place = None if options.checkpoint_dir is None else _open(crew, options, owners)
    source = _source(crew, options, place)
    if source is None:
        return Resumption(place)
    store, disks = source
    step = None if resume is None else step_of(resume.name)
    found, faults = find_checkpoint(crew, store, disks, step)
    if found is None:
        _check_nothing_is_lost(options, faults)
        return Resumption(place)
    _check_is_of_run(iters, found, identity, reporter)
    for text in faults.values():
        reporter.warn(f"damaged checkpoint passed over: {text}")
    if place is not None and store == place.store:
        step = found.manifest.step
        leaders = place.storage.disks.leaders
        crew.all(SeenCheckpoints.set_aside, store.directory, step, leaders, [*faults])
    return Resumption(place, found)


def _open(crew: Crew[SeenCheckpoints], options: CheckpointOptions, owners: int) -> Place:
    """Choose where a run saves its checkpoints, and keep other runs out."""
    directory = Path(str(options.checkpoint_dir))
    disks = crew.all(SeenCheckpoints.see_disks, directory, make=True)[0]
    names = [crew.transport.name(rank) for rank in range(crew.size)]
    storage = choose_storage(options.checkpoint_storage, disks, owners, names)
    used = [rank for writer in storage.writers for rank in disks.groups[disks.of(writer)]]
    crew.all(SeenCheckpoints.remove_if_empty, directory, used)
    crew.all(SeenCheckpoints.lock, directory, storage.committers)
    return Place(Store(directory), storage)


def _source(
    crew: Crew[SeenCheckpoints], options: CheckpointOptions, place: Place | None
) -> tuple[Store, Disks] | None:
    """Return the checkpoints among which the run looks for the one to go on from, and the disks
    that have them; None for a run that begins anew."""
    resume = options.named
    if place is not None:
        is_own = resume is None or _are_one(resume.parent, place.store.directory)
        if is_own and options.resume != "never":
            return place.store, place.storage.disks
        _refuse_mixture(crew, options, place)
    if resume is None:
        return None
    disks = crew.all(SeenCheckpoints.see_disks, resume.parent, make=False)[0]
    return Store(resume.parent), disks


def _are_one(directory: Path, other: Path) -> bool:
    try:
        return directory.samefile(other)
    except OSError:
        return False


def _check_is_of_run(
    iters: int,
    found: SoundCheckpoint,
    identity: Mapping[str, Any] | None,
    reporter: Reporter,
) -> None:
    """Raise ``UserError`` for a checkpoint of another run; warn of what differs otherwise."""
    manifest = found.manifest
    where = found.store.path(manifest.step)
    notes = [] if identity is None else check_identity(identity, manifest.identity, where)
    if manifest.step > iters:
        raise UserError(
            f"{where} is of step {manifest.step}, beyond --iters {iters}",
            "raise that, or name another --checkpoint-dir",
        )
    for text in notes:
        reporter.warn(f"{where}: {text}")


def _check_nothing_is_lost(options: CheckpointOptions, faults: Mapping[int, str]) -> None:
    """Raise ``UserError`` where a run would begin anew though it was asked to go on, or might."""
    if faults:
        raise UserError(
            f"--resume {options.resume}: no checkpoint is sound: {'; '.join(faults.values())}",
            "restore the file, or name another --checkpoint-dir to start anew",
        )
    if options.resume != "auto":
        raise UserError(
            f"--resume {options.resume}: there is no complete checkpoint",
            f"name a directory that holds {MARKER}, or give auto",
        )


def _refuse_mixture(crew: Crew[SeenCheckpoints], options: CheckpointOptions, place: Place) -> None:
    """Refuse checkpoints of two runs in one directory: auto could not tell which is the newest."""
    leaders = place.storage.disks.leaders
    of_ranks = crew.all(SeenCheckpoints.steps, place.store.directory, leaders)
    newest = max((step for steps in of_ranks for step in steps), default=None)
    if newest is not None:
        raise UserError(
            f"--resume {options.resume}: --checkpoint-dir {options.checkpoint_dir} holds "
            f"checkpoints of another run, up to step {newest}",
            "go on from them with --resume auto, or name another directory",
        )
