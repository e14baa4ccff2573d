"""Give every rank the tensors of its own stages, wherever the model lies: rank 0's part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from shardmlx.common.formatting import gibibytes
from shardmlx.common.reporter import Reporter
from shardmlx.distributed.crew import Crew
from shardmlx.loading.local_files import CopyPlan, Holding, LocalFiles, placed_tensors
from shardmlx.loading.manifest import is_needed, parts_of_shares, plan_transfers
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import WHOLE, TensorShares
from shardmlx.planning.job import Job


@dataclass(frozen=True, slots=True)
class Needs:
    """The layers that each rank reads: ``stages[rank]`` are ranges of them, and rank r of a group
    has its part of ``shares``."""

    stages: Sequence[Sequence[tuple[int, int]]]
    shape: ModelShape
    shares: TensorShares

    @classmethod
    def of(cls, job: Job, shape: ModelShape) -> Self:
        """Return what the ranks of a job read."""
        stages = [list(job.layers(rank)) for rank in range(job.mesh.size)]
        shares = job.shares
        if job.generation is not None and job.generation.setup.head:
            # The layer after the last, and the embedding.
            stages[-1] += [(shape.num_layers, shape.num_layers + 1), (0, 0)]
        if job.training is not None and job.training.way.fine_tune.fine_tune_type == "dora":
            shares = WHOLE  # DoRA begins with the norms of whole rows.
        return cls(stages, shape, shares)

    def tensors(self, plan: CopyPlan) -> list[set[str]]:
        """Return the names of the tensors that each rank must be brought."""
        tensors = plan.manifest.tensors()
        of_ranks = parts_of_shares(tensors, self.shape, self.shares, scattered=plan.is_scattered)
        needed = []
        for rank, (holding, stages) in enumerate(zip(plan.holdings, self.stages, strict=True)):
            names: set[str] = set()
            if holding is not Holding.WHOLE:
                own = of_ranks[rank % self.shares.size]
                names = {
                    own[name][0] if name in own else name
                    for name in tensors
                    if any(is_needed(name, self.shape, *ends) for ends in stages)
                }
            needed.append(names)
        return needed


def bring(crew: Crew[LocalFiles], needs: Needs, reporter: Reporter, what: str) -> None:
    """Bring each rank its tensors, once all ranks have built the model; say how many bytes came
    which way. On rank 0. Raises ``UserError``."""
    plan = crew.worker.plan
    if plan is None:
        return
    started = time.monotonic()
    tensors = placed_tensors(plan, needs.shape, needs.shares)
    wanted = wanted_of_keepers(plan, needs.tensors(plan))
    compared = crew.all(LocalFiles.compare, wanted, needs.shape, needs.shares)
    kept = [sum(tensors[name].nbytes for name in present) for present, _ in compared]
    downloaded = crew.all(LocalFiles.download_missing, what)
    present: dict[int, set[str]] = {}
    missing: dict[int, set[str]] = {}
    for rank, (there, lacking) in enumerate(compared):
        is_from_hub = plan.holdings[rank] is Holding.HUB
        if has := there | lacking if is_from_hub else there:
            present[rank] = has
        if lacking and not is_from_hub:
            missing[rank] = lacking
    whole = [rank for rank, held in enumerate(plan.holdings) if held is Holding.WHOLE]
    transfers = plan_transfers(tensors, whole, present, missing)
    # A rank that reads another rank's copy waits for it: all answer when all have theirs.
    received = crew.all(LocalFiles.exchange, transfers, what)
    ways = {"over MPI": received, "from the hub": downloaded, "from caches": kept}
    sums = [f"{gibibytes(sum(each))} {way}" for way, each in ways.items() if any(each)]
    if not sums:
        return
    of_ranks = [
        f"{crew.transport.name(rank)} {gibibytes(sum(each))}"
        for rank, each in enumerate(zip(*ways.values(), strict=True))
        if any(each)
    ]
    seconds = time.monotonic() - started
    reporter.say(f"{what}: {', '.join(sums)} in {seconds:.1f} s ({', '.join(of_ranks)})")


def wanted_of_keepers(plan: CopyPlan, needed: Sequence[set[str]]) -> list[set[str]]:
    """Return the tensors that each rank brings as a keeper, if rank r needs ``needed[r]``."""
    wanted: list[set[str]] = [set() for _ in needed]
    # Without a whole model, rank 0 must have the tensors that others are sent.
    relays = Holding.WHOLE not in plan.holdings
    for keeper, names in zip(plan.keepers, needed, strict=True):
        wanted[keeper] |= names
        if relays and plan.holdings[keeper] is Holding.LACKS:
            wanted[0] |= names
    return wanted
