"""Files that are complete after a power cut, or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from shardmlx.common.formatting import gibibytes
from shardmlx.errors import UserError

PARTIAL = "partial-"

LOCK = ".lock"
"""Name of the file in a directory by whose lock one process keeps others out."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

_IN_USE = "another process writes there"

_NO_FSYNC_OF_DIRECTORIES = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that keep names safe by themselves, or not at all."""


def pieces_of(path: Path) -> Iterator[bytes]:
    """Read a file in pieces of 4 MiB."""
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            yield piece


def read_exactly(descriptor: int, offset: int, count: int, where: str) -> bytes:
    """Return ``count`` bytes of a file; raise ``OSError`` if it ends before."""
    data = os.pread(descriptor, count, offset)
    while len(data) < count:  # a signal, or a network disk, may give less at a time
        more = os.pread(descriptor, count - len(data), offset + len(data))
        if not more:
            raise OSError(f"{where} ends at byte {offset + len(data)}, before it should")
        data += more
    return data


def flush_to_disk(file: IO[bytes]) -> None:
    """Wait until the content of a file is on the disk itself."""
    file.flush()
    flush_descriptor(file.fileno())


def flush_descriptor(descriptor: int) -> None:
    """Wait until a descriptor's data is on the disk itself."""
    if sys.platform == "darwin":
        # fsync on macOS leaves the data in the drive's own cache.
        with contextlib.suppress(OSError):  # network disks know fsync only
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def flush_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk: new, renamed and deleted ones."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_DIRECTORIES:
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        flush_to_disk(file)


def replace_durably(partial: Path, path: Path) -> None:
    """Give a complete file its final name, and replace the file that has it."""
    with partial.open("rb+") as file:
        flush_to_disk(file)
    os.replace(partial, path)
    flush_directory(path.parent)


def lock_file(path: Path, refusal: UserError) -> IO[bytes]:
    """Lock a file until it is closed, or this process ends. Raises ``refusal`` if another has."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise refusal from None
    except OSError:
        pass  # a network disk that knows no locks
    return file


class FileLock:
    """Keeps others from locking a file until ``release``, or until nobody has this object any more.
    Raises ``refusal`` if another has it, ``OSError`` if it cannot be written."""

    def __init__(self, path: Path, refusal: UserError) -> None:
        self._path = path
        self._file = lock_file(path, refusal)

    def release(self) -> None:
        """Let others have the file. It may be called again."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # it was not refused
            self.release()


class DirectoryLock(FileLock):
    """Keeps others out of a directory in the same way. Between two runs there is no file of it."""

    def __init__(self, directory: Path, refusal: UserError) -> None:
        super().__init__(directory / LOCK, refusal)
        while not self._is_at_its_place():
            # Its run ended, and removed it, between the opening of the file and its lock.
            self._file.close()
            self._file = lock_file(self._path, refusal)

    def release(self) -> None:
        """Let others have the directory. It may be called again."""
        try:
            if not self._file.closed:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
        finally:
            super().release()

    def _is_at_its_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False


class NewFiles:
    """New files of one directory, called ``partial-NAME`` until all are on the disk.

    From the first file to the last name the directory is locked, so that no other process, and no
    other ``NewFiles``, writes the same partial files or gives names in between.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.at_work_on = directory
        """Path of the file that is being written or renamed."""
        self._names: list[str] = []
        self._published = 0
        self._lock: int | None = None

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file, piece by piece, down to the disk. Raises `OSError`: a `BlockingIOError` if
        another process writes there."""
        if self._lock is None:
            self._lock = _locked_directory(self.directory)
        self.at_work_on = self.directory / name
        self._names.append(name)
        with self._partial(name).open("wb") as file:
            for piece in pieces:
                file.write(piece)
            flush_to_disk(file)

    def publish(self) -> None:
        """Give the files their names, in the order in which they were written. Raises `OSError`."""
        for name in self._names:
            self.at_work_on = self.directory / name
            os.replace(self._partial(name), self.at_work_on)
            flush_directory(self.directory)
            self._published += 1
        self._release()

    def discard(self) -> bool:
        """Remove the partial files unless one has its name already; return whether none has."""
        if not self._published:
            for name in self._names:
                with contextlib.suppress(OSError):
                    self._partial(name).unlink(missing_ok=True)
        self._release()
        return not self._published

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _partial(self, name: str) -> Path:
        return self.directory / (PARTIAL + name)


def _locked_directory(directory: Path) -> int:
    """Return a descriptor that locks a directory until it is closed. Raises ``OSError``."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BlockingIOError(error.errno, _IN_USE, str(directory)) from None
    except OSError:
        pass  # a network disk that knows no locks
    return descriptor


def check_room(directory: Path, nbytes: int, option: str) -> None:
    """Raise ``UserError`` unless so many bytes fit on the disk of a directory, there or not yet;
    ``option`` names another."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise UserError(
            f"{directory}: {gibibytes(nbytes)} are to be written, and {gibibytes(free)} are free "
            "there",
            f"free some, or name a directory on another disk with {option}",
        )


def why_not_written(error: OSError, directory: Path, nbytes: int) -> str:
    """Return why ``nbytes`` could not be written to a directory, and the remedy."""
    if isinstance(error, BlockingIOError):
        return f"{error.strerror}: wait for its end"
    if error.errno not in _FULL:
        return f"{error.strerror or error}: make it writable"
    free = ""
    with contextlib.suppress(OSError):
        free = f", and {gibibytes(shutil.disk_usage(directory).free)} are free"
    what = "the disk is full" if error.errno == errno.ENOSPC else "your disk quota is used up"
    return f"{what} ({gibibytes(nbytes)} are to be written{free}): free some of it"
