"""Files that are there after a power cut, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import IO

_NO_FSYNC_OF_DIRECTORIES = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that keep names safe by themselves, or not at all."""


def flush_to_disk(file: IO[bytes]) -> None:
    """Return once the content of a file is on the disk itself."""
    file.flush()
    if sys.platform == "darwin":
        # There fsync leaves the data in the drive's own cache.
        import fcntl

        with contextlib.suppress(OSError):  # network disks know fsync only
            fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
            return
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Return once the names in a directory are on the disk: new, renamed and deleted ones."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_DIRECTORIES:
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file, down to the disk."""
    with path.open("wb") as file:
        file.write(content)
        flush_to_disk(file)


def replace_durably(partial: Path, path: Path) -> None:
    """Give a complete file its final name, in the place of what had it."""
    with partial.open("rb+") as file:
        flush_to_disk(file)
    os.replace(partial, path)
    flush_directory(path.parent)
