"""Decide where a run saves its checkpoints, and from which it goes on, by what ranks have seen on
their disks. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardmlx.checkpoint.run_identity import check_identity
from shardmlx.checkpoint.storage import Place, choose_storage
from shardmlx.checkpoint.store import MARKER, Manifest, Store, step_of
from shardmlx.config.train import CheckpointOptions
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError

Versions = Mapping[int, Mapping[int, Manifest | str]]
"""The manifest of each complete checkpoint, or its fault, by step and disk."""


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """A version of a checkpoint whose files were read: ``sound[file]`` are the disks that have a
    sound copy of a file, ``faults`` those of files that have none."""

    manifest: Manifest
    sound: Mapping[str, tuple[int, ...]]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SoundCheckpoint:
    """A sound checkpoint. ``disks[file]`` are the disks that have a sound copy of a file."""

    store: Store
    seen_by: Disks
    manifest: Manifest
    disks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SeenDirectory:
    """A directory of checkpoints as the ranks see it, whose newest were ``checked`` until one was
    sound."""

    store: Store
    disks: Disks
    versions: Versions
    checked: tuple[CheckedVersion, ...] = ()

    def candidates(self, step: int | None) -> Iterator[int]:
        """Yield the steps to go on from, the best first: of all, or the ``step`` that a user
        names."""
        yield from sorted(self.versions, reverse=True) if step is None else [step]

    def choose(self, step: int | None) -> tuple[SoundCheckpoint | None, dict[int, str]]:
        """Return the newest sound checkpoint, or that of ``step``, and the faults, by step, of
        those that were passed over."""
        faults: dict[int, str] = {}
        for candidate in self.candidates(step):
            versions = self.versions.get(candidate, {})
            problems = [each for each in versions.values() if isinstance(each, str)]
            for each in self.checked:
                if each.manifest.step != candidate:
                    continue
                if not each.faults:
                    found = SoundCheckpoint(self.store, self.disks, each.manifest, each.sound)
                    return found, faults
                problems += each.faults
            if problems:
                faults[candidate] = problems[0]
        return None, faults


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The checkpoints that the ranks of these ``names`` see: in the run's ``own`` directory, and in
    the one among whose checkpoints it looks for that to go on from, its ``source``."""

    names: tuple[str, ...]
    own: SeenDirectory | None = None
    source: SeenDirectory | None = None

    @property
    def own_is_source(self) -> bool:
        """True if the run goes on from a checkpoint of its own directory, if it goes on."""
        if self.own is None or self.source is None:
            return False
        return self.own.store == self.source.store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The options by which a run begins, or goes on, its last step, and what it is known by."""

    options: CheckpointOptions
    iters: int
    identity: Mapping[str, Any] | None = None

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that the user names, if one is named."""
        named = self.options.named
        return None if named is None else step_of(named.name)


@dataclass(frozen=True, slots=True)
class Resumption:
    """The start of a run: saves nothing without a ``place``, starts anew without ``found``."""

    place: Place | None = None
    found: SoundCheckpoint | None = None
    damaged: tuple[int, ...] = ()
    """Steps of checkpoints that were passed over."""
    warnings: tuple[str, ...] = ()

    @property
    def superseded_after(self) -> int | None:
        """The step after which checkpoints of the run's directory are of another course than the
        run takes now; None where it goes on from no checkpoint of that directory."""
        if self.place is None or self.found is None or self.place.store != self.found.store:
            return None
        return self.found.manifest.step


def resume_point(start: RunStart, seen: CheckpointFacts, owners: int) -> Resumption:
    """Choose where the run saves its checkpoints, of ranks 0 to ``owners`` - 1, and the one that it
    goes on from: never a damaged one, or one of another run. Raises ``UserError``."""
    options = start.options
    place = None
    if seen.own is not None:
        storage = choose_storage(options.checkpoint_storage, seen.own.disks, owners, seen.names)
        place = Place(seen.own.store, storage)
        if not seen.own_is_source:
            _refuse_mixture(options, seen.own)
    if seen.source is None:
        return Resumption(place)
    found, faults = seen.source.choose(start.step)
    if found is None:
        _check_nothing_is_lost(options, faults)
        return Resumption(place)
    notes = _check_is_of_run(start, found)
    passed = (f"damaged checkpoint passed over: {text}" for text in faults.values())
    return Resumption(place, found, tuple(faults), (*notes, *passed))


def _check_is_of_run(start: RunStart, found: SoundCheckpoint) -> list[str]:
    """Raise ``UserError`` for a checkpoint of another run; return what differs otherwise."""
    manifest = found.manifest
    where = found.store.path(manifest.step)
    ours = start.identity
    notes = [] if ours is None else check_identity(ours, manifest.identity, where)
    if manifest.step > start.iters:
        raise UserError(
            f"{where} is of step {manifest.step}, beyond --iters {start.iters}",
            "raise that, or name another --checkpoint-dir",
        )
    return [f"{where}: {text}" for text in notes]


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


def _refuse_mixture(options: CheckpointOptions, own: SeenDirectory) -> None:
    """Refuse checkpoints of two runs in one directory: auto could not tell which is the newest."""
    if own.versions:
        raise UserError(
            f"--resume {options.resume}: --checkpoint-dir {options.checkpoint_dir} holds "
            f"checkpoints of another run, up to step {max(own.versions)}",
            "go on from them with --resume auto, or name another directory",
        )
