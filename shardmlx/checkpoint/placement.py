"""On whose disks the parts of a checkpoint lie.

Ranks need not see the same directory. Which do is found out by looking: each writes a file there,
and all see whose they find.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmlx.checkpoint.store import MARK
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.transport import Transport
from shardmlx.errors import one_line


@dataclass(frozen=True, slots=True)
class Disks:
    """``groups[i]`` are the ranks that see disk i, each rank once; in order of their lowest.

    ``problems[r]`` is why rank r cannot write there, None if it can.
    """

    groups: tuple[tuple[int, ...], ...]
    problems: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if sorted(rank for group in self.groups for rank in group) != list(
            range(len(self.problems))
        ):
            raise ValueError(f"{self.groups} are not {len(self.problems)} ranks, each once")

    def of(self, rank: int) -> int:
        """The disk that a rank sees."""
        return next(i for i, group in enumerate(self.groups) if rank in group)

    def leader(self, rank: int) -> int:
        """The rank that acts for all that see the same disk."""
        return self.groups[self.of(rank)][0]


def find_disks(transport: Transport, directory: Path, make: bool = True) -> Disks:
    """Which ranks see the same ``directory``; with ``make`` it is made where it is missing.

    Collective.
    """
    what = f"looking who sees {directory}"
    run = transport.broadcast(uuid.uuid4().hex, what=what)

    def mark(rank: int) -> Path:
        return directory / f"{MARK}{rank}-{run}"

    problem = None
    try:
        if make:
            directory.mkdir(parents=True, exist_ok=True)
        mark(transport.rank).touch()
    except OSError as error:
        problem = error.strerror or one_line(error)
    problems = transport.all_gather(problem, what)
    # By name, not by listing: a network disk may keep an old listing for a minute.
    seen = [rank for rank in range(transport.size) if _exists(mark(rank))]
    everyone = transport.all_gather(seen, what)
    with contextlib.suppress(OSError):
        mark(transport.rank).unlink()
    # Who cannot write is seen by nobody, but may see others.
    groups: list[set[int]] = []
    for rank, others in enumerate(everyone):
        joined = {rank, *others}.union(*(group for group in groups if group & {rank, *others}))
        groups = [group for group in groups if not group & joined] + [joined]
    return Disks(tuple(sorted(tuple(sorted(group)) for group in groups)), tuple(problems))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the parts of ranks 0 to ``owners`` - 1 go. ``kind`` is shared, rank0 or neighbour."""

    kind: str
    disks: Disks
    owners: int

    def homes(self, owner: int) -> tuple[int, ...]:
        """The ranks that write the part of rank ``owner``."""
        if self.kind == "rank0":
            return (0,)
        if self.kind == "shared":
            return (owner,)
        groups = self.disks.groups
        return (owner, groups[(self.disks.of(owner) + 1) % len(groups)][0])

    @property
    def writers(self) -> frozenset[int]:
        """The ranks that write any part."""
        return frozenset(home for owner in range(self.owners) for home in self.homes(owner))

    @property
    def committers(self) -> tuple[int, ...]:
        """The ranks that complete a checkpoint, each on its disk."""
        if self.kind != "neighbour":
            return (0,)
        return tuple(group[0] for group in self.disks.groups)


def choose_storage(wanted: str, disks: Disks, owners: int, names: Sequence[str]) -> Storage:
    """The storage for the parts of ranks 0 to ``owners`` - 1; ``wanted`` may be auto.

    ``names`` are the ranks'. Raises ``AgreedError`` where a rank cannot write what it would have
    to: all ranks know the same, so all raise it.
    """
    shared = len(disks.groups) == 1
    kind = wanted
    if wanted == "auto":
        # Without a common disk one copy of everything, on the machine that is looked after.
        kind = "shared" if shared and not any(disks.problems[:owners]) else "rank0"
    elif wanted == "neighbour" and shared:
        kind = "shared"
    elif wanted == "shared" and not shared:
        away = names[disks.groups[1][0]]
        raise AgreedError(
            f"--checkpoint-storage shared: {away} does not see the --checkpoint-dir of {names[0]}: "
            "name a directory on a disk that both have, or use auto"
        )
    storage = Storage(kind, disks, owners)
    for rank in sorted(storage.writers.union(storage.committers)):
        if disks.problems[rank] is not None:
            remedy = ", or use --checkpoint-storage rank0" if disks.problems[0] is None else ""
            raise AgreedError(
                f"{names[rank]} cannot write to --checkpoint-dir: {disks.problems[rank]}: name "
                f"another directory{remedy}"
            )
    return storage
