"""The checkpoints that one rank sees: what rank 0 lets all ranks do with them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from shardmlx.checkpoint.store import FileInfo, Manifest, Store
from shardmlx.common.durable_files import DirectoryLock
from shardmlx.distributed.crew import takes_long, together
from shardmlx.distributed.shared_disks import Disks, find_disks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError, file_access


class SeenCheckpoints:
    """The part of one rank in finding checkpoints, in directories that rank 0 names.

    One path may lie on different disks of the ranks, so each looks for itself. Must be released.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._locks: list[DirectoryLock] = []
        self._made: list[Path] = []
        """Directories that were not there before, the innermost first."""

    def store(self, directory: Path) -> Store:
        """Return a directory of checkpoints as this rank sees it."""
        return Store(directory)

    @together
    def see_disks(self, directory: Path, *, make: bool) -> Disks:
        """Find out, with the other ranks, which of them see the same directory; ``make`` it if it
        is missing."""
        path = self.store(directory).directory
        if make:
            self._made += [each for each in (path, *path.parents) if not os.path.exists(each)]
        return find_disks(self._transport, path, make)

    @takes_long
    def steps(self, directory: Path, leaders: Collection[int]) -> list[int]:
        """Return the steps of the complete checkpoints, if this rank is one of the ``leaders``,
        which act for their disks."""
        return self.store(directory).steps() if self._transport.rank in leaders else []

    @takes_long
    def manifests(self, directory: Path, leaders: Collection[int]) -> dict[int, Manifest | str]:
        """Return the manifest of each of these checkpoints by its step, or its fault."""
        store = self.store(directory)
        found = dict[int, Manifest | str]()
        for step in self.steps(directory, leaders):
            try:
                found[step] = store.manifest(step)
            except UserError as error:
                found[step] = str(error)
        return found

    @takes_long
    def faults(
        self, directory: Path, step: int, files: Sequence[FileInfo]
    ) -> dict[str, str | None]:
        """Return the fault of each of these files of a checkpoint; None for a sound one."""
        store = self.store(directory)
        return {file.name: store.fault(step, file) for file in files}

    def lock(self, directory: Path, committers: Collection[int]) -> None:
        """Keep other runs out of the directory, if this rank completes checkpoints there. Raises
        ``UserError`` if one writes there."""
        if self._transport.rank in committers:
            self._locks.append(self.store(directory).lock())

    def remove_if_empty(self, directory: Path, writers: Collection[int]) -> None:
        """Remove a directory that was made to find its disk, if no rank there is a writer."""
        if self._transport.rank not in writers:
            with contextlib.suppress(OSError):
                self.store(directory).directory.rmdir()

    @takes_long
    def set_aside(
        self, directory: Path, after: int, leaders: Collection[int], damaged: Collection[int]
    ) -> None:
        """Rename the checkpoints of later steps, from which the run takes another course. Raises
        ``UserError``."""
        store = self.store(directory)
        for step in self.steps(directory, leaders):
            if step > after:
                with file_access("rename", store.path(step)):
                    store.set_aside(step, "damaged" if step in damaged else "superseded")

    def release(self) -> None:
        """Let other runs have the directories, and remove those that were made and are empty: of a
        run that was refused. May be called again."""
        for lock in self._locks:
            lock.release()
        for directory in self._made:
            with contextlib.suppress(OSError):
                directory.rmdir()
