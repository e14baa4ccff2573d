"""A copy of a model on disk that has only some of its tensors, with a record of which.

Weight files have their full size, and holes where nothing was brought. Every complete tensor is
recorded with its digest, so that half written or damaged ones are brought again. No MLX, no MPI.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from shardmlx.common.digests import Digest, new_digest
from shardmlx.common.durable_files import (
    LOCK,
    check_room,
    flush_descriptor,
    flush_directory,
    flush_to_disk,
    lock_file,
    read_exactly,
)
from shardmlx.errors import UserError, file_access, one_line
from shardmlx.loading.manifest import ModelManifest
from shardmlx.modelfiles.safetensors_header import Header
from shardmlx.modelfiles.sources import RECORD

_FLUSH_EVERY = 1 << 28  # bytes that an interrupted copy may have to bring again
_THREADS = 4


class PartialCopy:
    """The copy in ``directory``, made if it is not there; ``option`` names another. One process
    writes; any other may read what is complete. ``kept``: for later runs, with a record on disk,
    and for one run at a time. Raises ``UserError`` if the disk refuses it."""

    def __init__(
        self,
        directory: Path,
        manifest: ModelManifest,
        *,
        kept: bool,
        option: str = "--weight-cache",
        new_digest: Callable[[], Digest] = new_digest,
    ) -> None:
        self.directory = directory
        self._new_digest = new_digest
        self._option = option
        self._manifest = manifest
        self.tensors = manifest.tensors()
        self._kept = kept
        self._pending: dict[str, bytes] = {}
        self._pending_bytes = 0
        self._files: dict[str, int] = {}
        self._lock: IO[bytes] | None = None
        another = f"name another directory with {option}"
        try:
            with file_access("copy the model to", directory, another):
                directory.mkdir(parents=True, exist_ok=True)
                if kept:
                    problem = f"another run is filling {directory}"
                    refusal = UserError(problem, f"wait for its end, or {another}")
                    self._lock = lock_file(directory / LOCK, refusal)
                for name, text in manifest.texts.items():
                    _write_anew(directory / name, text)
                for file, header in manifest.headers.items():
                    self._files[file] = _open_sparse(directory / file, header)
                if kept:
                    flush_directory(directory)
        except BaseException:
            self.close()
            raise

    def sound(self, names: Iterable[str]) -> set[str]:
        """Return the undamaged ones of ``names``, after reading all of them."""
        recorded = self._recorded()
        present = [name for name in names if name in recorded]
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = pool.map(self._digest, present)
            pairs = zip(present, digests, strict=True)
            return {name for name, digest in pairs if digest == recorded[name]}

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the bytes of these tensors."""
        return sum(self.tensors[name].nbytes for name in names)

    def check_room(self, names: Iterable[str]) -> None:
        """Raise ``UserError`` unless these tensors still fit on the disk."""
        check_room(self.directory, self.nbytes(names), self._option)

    def write(self, file: str, offset: int, data: memoryview | bytes) -> None:
        """Write bytes of a weight file; they count once the tensor is ``add``-ed."""
        view = memoryview(data)
        try:
            while view:
                done = os.pwrite(self._files[file], view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            where = self.directory / file
            named = OSError(f"cannot write {where}: {error.strerror or one_line(error)}")
            named.errno = error.errno
            raise named from None

    def read(self, file: str, offset: int, count: int) -> bytes:
        """Return bytes of a file of the copy."""
        return read_exactly(self._files[file], offset, count, file)

    def add(self, name: str, digest: bytes | None = None) -> None:
        """Record that a tensor is written; without its ``digest`` it is read again."""
        self._pending[name] = self._digest(name) if digest is None else digest
        self._pending_bytes += self.tensors[name].nbytes
        if self._pending_bytes >= _FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Make all complete tensors survive a power cut, if the copy is kept."""
        if self._kept and self._pending:
            for file in sorted({self.tensors[name].file for name in self._pending}):
                flush_descriptor(self._files[file])
            with (self.directory / RECORD).open("ab") as record:
                for name, digest in self._pending.items():
                    line = {"name": name, "digest": digest.hex()}
                    record.write(b"\n" + json.dumps(line).encode())
                flush_to_disk(record)
        self._pending = {}
        self._pending_bytes = 0

    def empty(self) -> None:
        """Return the tensors' space to the disk: their places are holes again."""
        for file, descriptor in self._files.items():
            _empty(descriptor, self._manifest.headers[file])
        self._pending = {}
        self._pending_bytes = 0

    def close(self) -> None:
        """Close the files; ranks that have opened them may read on."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        if self._lock is not None:
            self._lock.close()

    def _recorded(self) -> dict[str, bytes]:
        """Return the record, without a line that a power cut has torn."""
        recorded: dict[str, bytes] = {}
        if not self._kept:
            return recorded
        with contextlib.suppress(OSError):
            for line in (self.directory / RECORD).read_bytes().splitlines():
                try:
                    entry = json.loads(line)
                    if entry["name"] in self.tensors:
                        recorded[entry["name"]] = bytes.fromhex(entry["digest"])
                except (ValueError, KeyError, TypeError):
                    continue
        return recorded

    def _digest(self, name: str) -> bytes:
        place = self.tensors[name]
        digest = self._new_digest()
        for piece in place.pieces(self.read):
            digest.update(piece)
        return digest.digest()


def _write_anew(path: Path, content: bytes) -> None:
    """Write a file, unless it is there; in one step, since others may be reading it."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == content:
            return
    partial = path.with_name(f"partial-{path.name}")
    partial.write_bytes(content)
    os.replace(partial, path)


def _open_sparse(path: Path, header: Header) -> int:
    """Open a file that begins with this header; make it anew, with holes, unless it does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if (size, os.pread(descriptor, len(header.head), 0)) != (header.file_size, header.head):
            _empty(descriptor, header)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _empty(descriptor: int, header: Header) -> None:
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, header.file_size)
    os.pwrite(descriptor, header.head, 0)
