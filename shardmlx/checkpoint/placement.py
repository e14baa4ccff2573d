"""Choose the disks on which the parts of a checkpoint lie. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.shared_disks import Disks


@dataclass(frozen=True, slots=True)
class Storage:
    """The disks for the parts of ranks 0 to ``owners`` - 1.

    ``kind`` is ``shared`` (each rank writes its part to the disk that all see), ``rank0`` (rank 0
    writes all) or ``neighbour`` (each rank writes its part, and a rank of another disk a copy).
    """

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
        """Ranks that write any part."""
        return frozenset(home for owner in range(self.owners) for home in self.homes(owner))

    @property
    def committers(self) -> tuple[int, ...]:
        """Ranks that complete a checkpoint, each on its disk."""
        if self.kind != "neighbour":
            return (0,)
        return tuple(group[0] for group in self.disks.groups)


def choose_storage(wanted: str, disks: Disks, owners: int, names: Sequence[str]) -> Storage:
    """Choose the storage for the parts of ranks 0 to ``owners`` - 1; ``wanted`` may be auto.

    ``names`` are the ranks'. Raises ``AgreedError`` on all ranks if one of them cannot write its
    part.
    """
    shared = len(disks.groups) == 1
    kind = wanted
    if wanted == "auto":
        # Without a common disk, rank 0 keeps the only copy, on the machine that users look after.
        kind = "shared" if shared and not any(disks.problems[:owners]) else "rank0"
    elif wanted == "neighbour" and shared:
        kind = "shared"
    elif wanted == "shared" and not shared:
        away = names[disks.groups[1][0]]
        raise AgreedError(
            f"--checkpoint-storage shared: {away} does not see the --checkpoint-dir of {names[0]}",
            "name a directory on a disk that both have, or use auto",
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
