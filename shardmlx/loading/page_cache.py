"""Keep weight files out of the page cache if a memory cgroup charges it to this process.

The kernel would give that memory back before it kills, but until then the files crowd out the
process's own memory, and its peak says nothing. No MLX, no MPI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from shardmlx.common.process_memory import cgroup_bounds

DROP_EVERY = 16 << 20
"""Bytes read or written between two droppings."""


class PageCache:
    """Counts bytes of weight files that pass through the page cache, and calls ``drop`` when they
    are many. Does nothing outside a memory cgroup, where the next run profits from the cache."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop if any(cgroup_bounds()) else None
        self._nbytes = 0

    def count(self, nbytes: int) -> None:
        """Count bytes that were read or written."""
        self._nbytes += nbytes
        if self._nbytes >= DROP_EVERY:
            self.clear()

    def clear(self) -> None:
        """Drop the current content."""
        self._nbytes = 0
        if self._drop is not None:
            self._drop()


def drop_files(paths: Iterable[Path]) -> None:
    """Drop these files from the page cache."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                drop(descriptor)
            finally:
                os.close(descriptor)


def drop(descriptor: int) -> None:
    """Drop an open file from the page cache, once it is on disk."""
    if hasattr(os, "posix_fadvise"):  # macOS does not charge its cache
        with suppress(OSError):
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
