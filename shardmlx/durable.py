"""Files that are there after a power cut, or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO


def flush_to_disk(file: IO[bytes]) -> None:
    """Return once what was written is on the disk itself."""
    file.flush()
    if sys.platform == "darwin":
        # There fsync leaves the data in the drive's own cache.
        import fcntl

        fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
    else:
        os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Return once the names in a directory are on the disk: new, renamed and deleted ones."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file, down to the disk."""
    with path.open("wb") as file:
        file.write(content)
        flush_to_disk(file)


def replace_durably(partial: Path, path: Path) -> None:
    """Give a file that is on the disk its final name, in the place of what had it."""
    os.replace(partial, path)
    flush_directory(path.parent)
