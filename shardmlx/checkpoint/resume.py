"""Find the place of a run's checkpoints, and the checkpoint to resume, before anything loads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shardmlx.checkpoint.reader import SoundCheckpoint, find_checkpoint
from shardmlx.checkpoint.run_identity import check_identity
from shardmlx.checkpoint.store import MARKER, Store, name_of, step_of
from shardmlx.common.reporter import Reporter
from shardmlx.config.train import CheckpointOptions
from shardmlx.distributed.agreement import AgreedError, on_all_ranks
from shardmlx.distributed.shared_disks import Disks, find_disks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import file_access


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
        return frozenset(home for owner in range(self.owners) for home in self.homes(owner))

    @property
    def committers(self) -> tuple[int, ...]:
        """Ranks that complete a checkpoint, each on its disk."""
        if self.kind != "neighbour":
            return (0,)
        return tuple(group[0] for group in self.disks.groups)


def choose_storage(wanted: str, disks: Disks, owners: int, names: Sequence[str]) -> Storage:
    """Choose the storage for ranks 0 to ``owners`` - 1, called ``names``; ``wanted`` may be auto.
    Raises ``AgreedError`` on all ranks if one of them cannot write its part."""
    shared = len(disks.groups) == 1
    kind = wanted
    if wanted == "auto":
        # Without a common disk, rank 0 keeps the only copy, on the machine that users look after.
        kind = "shared" if shared and not any(disks.problems[:owners]) else "rank0"
    elif wanted == "neighbour" and shared:
        kind = "shared"
    elif wanted == "shared" and not shared:
        away = names[disks.groups[1][0]]
        raise AgreedError(
            f"checkpoint_storage is shared: {away} does not see the --checkpoint-dir of {names[0]}",
            "name a directory on a disk that both have, or use auto",
        )
    storage = Storage(kind, disks, owners)
    for rank in sorted(storage.writers.union(storage.committers)):
        if disks.problems[rank] is not None:
            remedy = ", or use checkpoint_storage: rank0" if disks.problems[0] is None else ""
            raise AgreedError(
                f"{names[rank]} cannot write to --checkpoint-dir: {disks.problems[rank]}: name "
                f"another directory{remedy}"
            )
    return storage


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a run's checkpoints; ``lock`` keeps other runs away while it is open."""

    store: Store
    storage: Storage
    lock: IO[bytes] | None


@dataclass(frozen=True, slots=True)
class Resumption:
    """The start of a run: saves nothing without a ``place``, starts anew without ``found``."""

    place: Place | None = None
    found: SoundCheckpoint | None = None

    def release(self) -> None:
        """Let other runs have the place."""
        if self.place is not None and self.place.lock is not None:
            self.place.lock.close()


def prepare_resumption(
    options: CheckpointOptions,
    iters: int,
    transport: Transport,
    reporter: Reporter,
    identity: Mapping[str, Any] | None,
    owners: int,
) -> Resumption:
    """Find where the run saves its checkpoints, and the one that it goes on from: never a damaged
    one, or one of another ``identity`` than rank 0's; auto skips damaged ones, with a warning. All
    ranks must call it. Raises ``AgreedError``."""
    resume = options.named
    if resume is not None and step_of(resume.name) is None:
        raise AgreedError(
            f"--resume {resume}",
            f"give auto, never, or the directory of a checkpoint, like {name_of(100)}",
        )
    directory = None if options.checkpoint_dir is None else Path(options.checkpoint_dir)
    place = None if directory is None else _open(options, transport, directory, owners)
    with ExitStack() as on_failure:
        on_failure.callback(Resumption(place).release)
        resumption = _from(options, iters, transport, reporter, identity, place)
        on_failure.pop_all()
    return resumption


def _from(
    options: CheckpointOptions,
    iters: int,
    transport: Transport,
    reporter: Reporter,
    identity: Mapping[str, Any] | None,
    place: Place | None,
) -> Resumption:
    """Find the checkpoint that the run goes on from, whose own are in ``place``."""
    resume = options.named
    is_own = resume is None
    if place is not None and resume is not None:
        with contextlib.suppress(OSError):
            is_own = resume.parent.samefile(place.store.directory)
        # Rank 0 decides, since others may work elsewhere.
        is_own = transport.broadcast(is_own, what="comparing directories")
    if place is not None and is_own:
        store, disks = place.store, place.storage.disks
    elif resume is None:
        return Resumption()
    else:
        _refuse_mixture(options, transport, place)
        store = Store(resume.parent)
        disks = find_disks(transport, resume.parent, make=False)
    if options.resume == "never":
        _refuse_mixture(options, transport, place)
        return Resumption(place)
    step = None if resume is None else step_of(resume.name)
    found, faults = find_checkpoint(transport, store, disks, step)
    if found is None:
        _check_nothing_is_lost(options, faults)
        return Resumption(place)
    where = store.path(found.manifest.step)

    def compare() -> list[str]:
        return [] if identity is None else check_identity(identity, found.manifest.identity, where)

    notes = on_all_ranks(transport, "comparing the checkpoint with this run", compare)
    if found.manifest.step > iters:
        raise AgreedError(
            f"{where} is of step {found.manifest.step}, beyond --iters {iters}",
            "raise that, or name another --checkpoint-dir",
        )
    for text in notes:
        reporter.warn(f"{where}: {text}")
    for text in faults.values():
        reporter.warn(f"damaged checkpoint passed over: {text}")
    if place is not None and store is place.store:
        _set_aside(transport, place, found.manifest.step, faults)
    return Resumption(place, found)


def _check_nothing_is_lost(options: CheckpointOptions, faults: Mapping[int, str]) -> None:
    """Raise ``AgreedError`` where a run would begin anew though it was asked to go on, or might."""
    if faults:
        raise AgreedError(
            f"--resume {options.resume}: no checkpoint is sound: {'; '.join(faults.values())}",
            "restore the file, or name another --checkpoint-dir to start anew",
        )
    if options.resume != "auto":
        raise AgreedError(
            f"--resume {options.resume}: there is no complete checkpoint",
            f"name a directory that holds {MARKER}, or give auto",
        )


def _open(options: CheckpointOptions, transport: Transport, directory: Path, owners: int) -> Place:
    disks = find_disks(transport, directory)
    names = [transport.name(rank) for rank in range(transport.size)]
    storage = choose_storage(options.checkpoint_storage, disks, owners, names)
    store = Store(directory)
    if not any(disks.of(rank) == disks.of(transport.rank) for rank in storage.writers):
        with contextlib.suppress(OSError):
            directory.rmdir()  # created to find its disks; if empty, it is not needed here

    def lock() -> IO[bytes] | None:
        return store.lock() if transport.rank in storage.committers else None

    return Place(store, storage, on_all_ranks(transport, "locking the checkpoints", lock))


def _refuse_mixture(options: CheckpointOptions, transport: Transport, place: Place | None) -> None:
    """Refuse checkpoints of two runs in one directory: auto could not tell which is the newest."""
    if place is None:
        return
    mine = place.store.steps() if place.storage.disks.leads(transport.rank) else []
    steps = sorted({s for theirs in transport.all_gather(mine, "looking around") for s in theirs})
    if steps:
        raise AgreedError(
            f"--resume {options.resume}: --checkpoint-dir {options.checkpoint_dir} holds "
            f"checkpoints of another run, up to step {steps[-1]}",
            "go on from them with --resume auto, or name another directory",
        )


def _set_aside(transport: Transport, place: Place, step: int, faults: Mapping[int, str]) -> None:
    """Rename the checkpoints after ``step``, from which the run takes another course."""

    def rename() -> None:
        leads = place.storage.disks.leads(transport.rank)
        for each in [each for each in place.store.steps() if each > step and leads]:
            with file_access("rename", place.store.path(each)):
                place.store.set_aside(each, "damaged" if each in faults else "superseded")

    on_all_ranks(transport, "setting newer checkpoints aside", rename)
