"""The place of a run's checkpoints: which ranks write what, and who completes it. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.checkpoint.store import Store
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError


@dataclass(frozen=True, slots=True)
class Storage:
    """The disks for the parts of ranks 0 to ``owners`` - 1: ``shared`` (each rank writes its part
    to the disk that all see), ``rank0`` (rank 0 writes all) or ``neighbour`` (each rank writes its
    part, and a rank of another disk a copy)."""

    kind: str
    disks: Disks
    owners: int

    def homes(self, owner: int) -> tuple[int, ...]:
        """Return the ranks that write the part of rank ``owner``."""
        if self.kind == "rank0":
            return (0,)
        if self.kind == "shared":
            return (owner,)
        groups = self.disks.groups
        return (owner, groups[(self.disks.of(owner) + 1) % len(groups)][0])

    @property
    def writers(self) -> frozenset[int]:
        """Ranks that write some part."""
        return frozenset(home for owner in range(self.owners) for home in self.homes(owner))

    @property
    def committers(self) -> tuple[int, ...]:
        """Ranks that complete a checkpoint, each on its disk."""
        return committers_of(self.kind, self.disks)


def committers_of(kind: str, disks: Disks) -> tuple[int, ...]:
    """Return the ranks that complete checkpoints in a storage of a ``kind``, which may be auto."""
    return disks.leaders if kind == "neighbour" else (0,)


def choose_storage(wanted: str, disks: Disks, owners: int, names: Sequence[str]) -> Storage:
    """Choose the storage for ranks 0 to ``owners`` - 1, called ``names``; ``wanted`` may be auto.
    Raises ``UserError`` if one of them cannot write its part."""
    shared = len(disks.groups) == 1
    kind = wanted
    if wanted == "auto":
        # Without a common disk, rank 0 keeps the only copy, on the machine that users look after.
        kind = "shared" if shared and not any(disks.problems[:owners]) else "rank0"
    elif wanted == "neighbour" and shared:
        kind = "shared"
    elif wanted == "shared" and not shared:
        away = names[disks.groups[1][0]]
        raise UserError(
            f"checkpoint_storage is shared: {away} does not see the --checkpoint-dir of {names[0]}",
            "name a directory on a disk that both have, or use auto",
        )
    storage = Storage(kind, disks, owners)
    for rank in sorted(storage.writers.union(storage.committers)):
        if disks.problems[rank] is not None:
            remedy = ", or use checkpoint_storage: rank0" if disks.problems[0] is None else ""
            raise UserError(
                f"{names[rank]} cannot write to --checkpoint-dir: {disks.problems[rank]}: name "
                f"another directory{remedy}"
            )
    return storage


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a run's checkpoints."""

    store: Store
    storage: Storage
