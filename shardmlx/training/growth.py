"""Find what grows from report to report until a run ends of it. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shardmlx.common.formatting import gibibytes
from shardmlx.engine.batches import MOST_WIDTHS
from shardmlx.planning.memory.limits import MemoryLimits

REPORTS = 4
"""Number of reports of which the least active memory counts: gradients come and go between them."""

TIMES = 5
"""Number of such minima, each above the one before: chance seldom orders so many."""

LEAST_GROWTH = 1.01
"""Factor from the first to the last below which memory may still settle."""


@dataclass(slots=True)
class Growth:
    """Compares each report of a run with those before, and warns once of each thing that grows."""

    hosts: Sequence[str]
    limits: Sequence[MemoryLimits]
    _reports: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    _named: set[int | str] = field(default_factory=set)

    def observe(self, step: int, shapes: int, active: Sequence[int]) -> Iterator[str]:
        """Yield warnings, from the shapes of micro-batches so far and each rank's active bytes."""
        is_compiled = self.limits[0].backend != "cpu"
        if is_compiled and shapes > MOST_WIDTHS and "shapes" not in self._named:
            self._named.add("shapes")
            yield (
                f"step {step}: micro-batches have had {shapes} shapes, each a compiled graph that "
                "stays in memory: give a --micro-batch-size that divides the rows of a replica"
            )
        self._reports = [*self._reports, (step, active)][-REPORTS * TIMES :]
        if len(self._reports) < REPORTS * TIMES:
            return
        steps, held = zip(*self._reports, strict=True)
        for rank, of_rank in enumerate(zip(*held, strict=True)):
            least = [min(of_rank[i : i + REPORTS]) for i in range(0, len(of_rank), REPORTS)]
            first, *_, last = least
            rises = all(a < b for a, b in pairwise(least))
            if rank in self._named or not rises or last < LEAST_GROWTH * first:
                continue
            self._named.add(rank)
            slope = (last - first) / (steps[-REPORTS] - steps[0])
            limit = self.limits[rank].memory
            yield (
                f"step {step}: the arrays of rank {rank} on {self.hosts[rank]} grow by "
                f"{gibibytes(slope)} a step, to {gibibytes(last)}: at this rate they reach the "
                f"limit of {gibibytes(limit)} after {max(0, int((limit - last) / slope))} more "
                "steps; a restart from a checkpoint (--checkpoint-every) frees them"
            )
