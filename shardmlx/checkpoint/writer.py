"""Write checkpoints in the background, while the next step computes.

A snapshot copies nothing: it holds the arrays of weights and optimizer state, which do not change
before the next optimizer update. That update waits until they are written (the pipelining of
CheckFreq, Mohan et al., FAST 2021), so a checkpoint takes no memory of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardmlx.checkpoint.export import SaveError, safetensors_header, specs_of
from shardmlx.checkpoint.storage import Storage
from shardmlx.checkpoint.store import FileInfo, Manifest, Store
from shardmlx.common.durable_files import flush_to_disk
from shardmlx.common.environment import tell_launch_of_checkpoint
from shardmlx.distributed import byte_stream
from shardmlx.distributed.byte_stream import Incoming, Outgoing
from shardmlx.distributed.messages import buffer_of, in_a_row
from shardmlx.distributed.tags import CHECKPOINT_TAG, tag_of_run
from shardmlx.distributed.transport import Transport
from shardmlx.errors import one_line
from shardmlx.models.runtime.slice import Piece

SECONDS_TO_WRITE = 12 * 3600.0
"""Limit of a wait: a slow network may need hours, and signs of life reveal a dead rank."""

POLL_SECONDS = 0.1
"""Seconds between checks for a failure of another rank."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The safetensors file of a checkpoint before it is written: name, header and arrays."""

    name: str
    header: bytes
    arrays: tuple[mx.array, ...]

    @classmethod
    def of(
        cls, name: str, tensors: Mapping[str, mx.array], pieces: Mapping[str, Piece] | None = None
    ) -> Snapshot:
        """Hold these tensors, which must not change until they are written; ``pieces`` are those of
        ``safetensors_header``."""
        mx.eval(list(tensors.values()))
        # Parts of larger arrays are held as they are, too.
        arrays = [in_a_row(array) for array in tensors.values()]
        return cls(name, safetensors_header(specs_of(tensors), pieces), tuple(arrays))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(array.nbytes for array in self.arrays)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the file, in pieces of at most ``PIECE_BYTES``."""
        yield memoryview(self.header)
        for data in map(buffer_of, self.arrays):
            for start in range(0, len(data), byte_stream.PIECE_BYTES):
                yield data[start : start + byte_stream.PIECE_BYTES]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete. Writing it took ``seconds`` in the background."""

    step: int
    nbytes: int
    seconds: float


class CheckpointWriter:
    """The part of one rank in writing; those of several ``run``s may write at once. Rank 0
    lets all ranks build one, and call its methods."""

    def __init__(
        self, transport: Transport, store: Store, storage: Storage, keep: int, run: int = 0
    ) -> None:
        self._transport = transport
        self._tag = tag_of_run(CHECKPOINT_TAG, run)
        self._store = store
        self._storage = storage
        self._keep = keep
        self._taking_part = sorted({*range(storage.owners), *storage.writers, *storage.committers})
        self._thread: threading.Thread | None = None
        self._arrays_free = threading.Event()
        self._arrays_free.set()
        self._files: list[Path] = []
        self._saved: Saved | None = None
        self._error: Exception | None = None

    def start(self, manifest: Manifest | None, step: int, parts: Sequence[Snapshot]) -> None:
        """Begin to write, after the previous checkpoint; ``manifest`` lacks only its ``files``."""
        self.wait()
        if self._transport.rank not in self._taking_part:
            return
        if parts:
            self._arrays_free.clear()
        self._thread = threading.Thread(
            target=self._run, args=(manifest, step, list(parts)), name="checkpoint", daemon=True
        )
        self._thread.start()

    def release(self) -> None:
        """Wait until the arrays of this rank's parts may change."""
        self._wait_until(self._arrays_free.wait)

    def wait(self) -> None:
        """Wait until this rank has written all; on rank 0, until the checkpoint is complete."""
        if (thread := self._thread) is not None:

            def ended(seconds: float) -> bool:
                thread.join(seconds)
                return not thread.is_alive()

            self._wait_until(ended)

    def take_saved(self) -> Saved | None:
        """Return, on rank 0, the checkpoint that was completed since the last call."""
        saved, self._saved = self._saved, None
        return saved

    def _wait_until(self, done: Callable[[float], bool]) -> None:
        while not done(POLL_SECONDS):
            self._transport.activity.check(self._transport.activity.where)
        if self._error is not None:
            raise self._error

    def _run(self, manifest: Manifest | None, step: int, parts: list[Snapshot]) -> None:
        start = time.monotonic()
        try:
            with self._transport.longer_timeout(SECONDS_TO_WRITE):
                files = self._write(manifest, step, parts)
            if self._transport.rank == 0:
                nbytes = sum(file.nbytes for file in files)
                self._saved = Saved(step, nbytes, time.monotonic() - start)
                tell_launch_of_checkpoint()
        except Exception as error:
            self._error = SaveError(
                f"{self._transport.name(self._transport.rank)}, writing the checkpoint of step "
                f"{step} to {self._store.directory}: {_reason(error)}"
            )
            # The disk may be full. Files of other ranks stay theirs until the next checkpoint is
            # begun.
            with contextlib.suppress(OSError):
                for path in self._files:
                    path.unlink(missing_ok=True)
            self._transport.fail(self._error)
        finally:
            self._arrays_free.set()

    def _write(
        self, manifest: Manifest | None, step: int, parts: list[Snapshot]
    ) -> tuple[FileInfo, ...]:
        rank = self._transport.rank
        self._files.clear()
        self._begin(step)
        mine: list[FileInfo] = []
        # All ranks take owners in one order, so that none waits for one that waits for it.
        for owner in range(self._storage.owners):
            homes = self._storage.homes(owner)
            if rank == owner:
                mine += self._write_own(step, parts, homes)
                self._arrays_free.set()
            elif rank in homes:
                mine += self._write_received(step, owner)
        # Complete only when every part is on its disks, and all ranks agree on the files.
        if rank != 0:
            self._send(mine, 0)
            if rank in self._storage.committers:
                self._commit_told()
            return tuple(mine)
        assert manifest is not None, "rank 0 has it"
        return self._commit_everywhere(manifest, mine)

    def _commit_told(self) -> None:
        """Complete the checkpoint on this rank's disk, as rank 0 says."""
        self._store.commit(self._receive(0))
        self._send(None, 0)
        self._receive(0)
        self._store.prune(self._keep)

    def _commit_everywhere(
        self, manifest: Manifest, mine: Sequence[FileInfo]
    ) -> tuple[FileInfo, ...]:
        """Complete the checkpoint on all disks, on rank 0, once all ranks have written their files;
        return all files."""
        files: dict[str, FileInfo] = {}
        written = [*mine, *(file for peer in self._taking_part[1:] for file in self._receive(peer))]
        for file in written:
            if files.setdefault(file.name, file) != file:
                raise OSError(f"two copies of {file.name} differ")
        complete = replace(manifest, files=tuple(files[name] for name in sorted(files)))
        others = [peer for peer in self._storage.committers if peer]
        for peer in others:
            self._send(complete, peer)
        self._store.commit(complete)
        for peer in others:
            self._receive(peer)
        # Old checkpoints go when all disks have the new one: one disk alone may lack some of its
        # files.
        for peer in others:
            self._send(None, peer)
        self._store.prune(self._keep)
        return complete.files

    def _write_received(self, step: int, owner: int) -> Iterator[FileInfo]:
        """Write the files that another rank sends."""
        for name, nbytes in self._receive(owner):
            path = self._store.partial(step) / name
            pieces = Incoming(self._transport, nbytes, owner, self._tag, f"saving {name}")
            yield self._write_file(name, nbytes, pieces, path)

    def _begin(self, step: int) -> None:
        """Make the directory on each disk before any rank that sees the disk writes to it."""
        rank = self._transport.rank
        disks = self._storage.disks
        if rank in self._storage.committers:
            self._store.begin(step)
            for home in sorted(self._storage.writers - {rank}):
                if disks.of(home) == disks.of(rank):
                    self._send(None, home)
        elif rank in self._storage.writers:
            self._receive(disks.leader(rank))

    def _write_own(
        self, step: int, parts: list[Snapshot], homes: Sequence[int]
    ) -> Iterator[FileInfo]:
        rank = self._transport.rank
        away = [home for home in homes if home != rank]
        for home in away:
            self._send([(part.name, part.nbytes) for part in parts], home)
        while parts:
            part = parts.pop(0)  # its arrays are free as soon as it is written
            streams = [
                Outgoing(self._transport, part.nbytes, home, self._tag, f"saving {part.name}")
                for home in away
            ]
            path = self._store.partial(step) / part.name if rank in homes else None
            yield self._write_file(part.name, part.nbytes, part.pieces(), path, streams)

    def _write_file(
        self,
        name: str,
        nbytes: int,
        pieces: Iterable[memoryview],
        path: Path | None,
        streams: Sequence[Outgoing] = (),
    ) -> FileInfo:
        """Write the pieces of a file to ``path``, if it is given, and to the streams."""
        digest = hashlib.sha256()
        if path is not None:
            self._files.append(path)
        with nullcontext() if path is None else path.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                if file is not None:
                    file.write(piece)
                for stream in streams:
                    stream.write(piece)
            if file is not None:
                flush_to_disk(file)
        for stream in streams:
            stream.close()
        return FileInfo(name, nbytes, digest.hexdigest())

    def _send(self, value: Any, peer: int) -> None:
        self._transport.send_object(value, peer, "writing a checkpoint", self._tag)

    def _receive(self, peer: int) -> Any:
        return self._transport.receive_object(peer, "writing a checkpoint", self._tag)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full: free some of it, or lower keep_checkpoints"
    return one_line(error)
