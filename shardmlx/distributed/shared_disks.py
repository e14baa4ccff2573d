"""Find out which ranks see the same disk.

One path may be different directories on different ranks. Each rank writes a file there, and all
look whose files they find.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardmlx.errors import one_line

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport

PROBE = ".rank-"
"""Prefix of the files by which ranks find out which of them share a directory."""


@dataclass(frozen=True, slots=True)
class Disks:
    """Groups of ranks that see the same disk.

    ``groups[i]`` are the ranks that see disk i, each rank once; in order of their lowest.
    ``problems[r]`` says why rank r cannot write there, None if it can.
    """

    groups: tuple[tuple[int, ...], ...]
    problems: tuple[str | None, ...]

    def of(self, rank: int) -> int:
        """Return the index of the disk that a rank sees."""
        return next(i for i, group in enumerate(self.groups) if rank in group)

    def leader(self, rank: int) -> int:
        """Return the rank that acts for all ranks on its disk."""
        return self.groups[self.of(rank)][0]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The ranks that act for all ranks on their disk, one of each disk."""
        return tuple(group[0] for group in self.groups)


def find_disks(transport: Transport, directory: Path, make: bool = True) -> Disks:
    """Find out which ranks see the same ``directory``; ``make`` it if it is missing.

    All ranks must call it.
    """
    what = f"looking who sees {directory}"
    run = transport.broadcast(uuid.uuid4().hex, what=what)

    def mark(rank: int) -> Path:
        return directory / f"{PROBE}{rank}-{run}"

    problem = None
    try:
        if make:
            directory.mkdir(parents=True, exist_ok=True)
        mark(transport.rank).touch()
    except OSError as error:
        problem = error.strerror or one_line(error)
    problems = transport.all_gather(problem, what)
    # Look names up instead of listing: a network disk may keep an old listing for a minute.
    seen = [rank for rank in range(transport.size) if os.path.exists(mark(rank))]
    everyone = transport.all_gather(seen, what)
    with contextlib.suppress(OSError):
        mark(transport.rank).unlink()
    # A rank that cannot write is not seen, but may see others.
    groups: list[set[int]] = []
    for rank, others in enumerate(everyone):
        joined = {rank, *others}.union(*(group for group in groups if group & {rank, *others}))
        groups = [group for group in groups if not group & joined] + [joined]
    return Disks(tuple(sorted(tuple(sorted(group)) for group in groups)), tuple(problems))
