"""On which cores tests compute, where the operating system lets a process choose."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from testbed.jobs import CACHE


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep all threads of this process on one core, which no other worker of the tests has.

    One thread goes on at a time, in a world and where MLX computes small arrays. A turn that moves
    to another core costs as much as what is done in it. Children stay on that core too.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    with _own_core(sorted(cores)) as core:
        _move_threads({core})
        try:
            yield
        finally:
            _move_threads(cores)


@contextlib.contextmanager
def _own_core(cores: list[int]) -> Iterator[int]:
    """Yield the first core that no other worker has, or else any of them."""
    CACHE.mkdir(exist_ok=True)
    with contextlib.ExitStack() as files:
        for core in cores:
            file = files.enter_context((CACHE / f"core-{core}").open("w"))
            if _is_free(file):
                break
        else:
            core = cores[os.getpid() % len(cores)]
        yield core


def _is_free(file: TextIO) -> bool:
    """Take a file that no other process has taken; it is left where it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _move_threads(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
