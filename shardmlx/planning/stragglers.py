"""Find ranks that are slower than expected, beside the others. No MLX, no MPI.

The first reports of a run set the usual time of a rank: one that becomes slow is found, and not one
that is slow from its first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

TOLERANCE = 1.25
"""Factor by which a rank may exceed its expected time, relative to the others."""

REPORTS_IN_A_ROW = 3
"""Slow reports in a row that make a straggler; fewer are a hiccup: a page fault, a backup."""

REPORTS_TO_KNOW = 3
"""Number of reports that set the usual time; the first may warm up."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank's seconds of computing a step, and those that would keep up with the others."""

    step: int
    rank: int
    host: str
    compute_seconds: float
    expected_seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} computes {self.compute_seconds:.3g} s a step where "
            f"{self.expected_seconds:.3g} s would keep up with the others: something slows it down"
        )


@dataclass(slots=True)
class Watch:
    """Compares the world ranks of a run at each report and names a straggler once."""

    hosts: Sequence[str]
    _first: list[Sequence[float]] = field(default_factory=list)
    _slow_reports: list[int] = field(default_factory=list)
    _named: set[int] = field(default_factory=set)

    def observe(self, step: int, measured: Sequence[float]) -> list[Straggler]:
        """Return the new stragglers, by the seconds that each world rank computes in a step. A
        report without some rank is ignored."""
        if len(measured) < 2 or not all(math.isfinite(each) and each > 0 for each in measured):
            return []
        if len(self._first) < REPORTS_TO_KNOW:
            self._first.append(measured)
            return []
        usual = [median(of_rank) for of_rank in zip(*self._first, strict=True)]
        slowdowns = [seconds / each for seconds, each in zip(measured, usual, strict=True)]
        self._slow_reports = self._slow_reports or [0] * len(measured)
        found = []
        for rank, slowdown in enumerate(slowdowns):
            others = median(slowdowns[:rank] + slowdowns[rank + 1 :])
            is_slow = min(slowdown, slowdown / others) > TOLERANCE
            self._slow_reports[rank] = self._slow_reports[rank] + 1 if is_slow else 0
            if self._slow_reports[rank] < REPORTS_IN_A_ROW or rank in self._named:
                continue
            self._named.add(rank)
            seconds = measured[rank]
            found.append(
                Straggler(step, rank, self.hosts[rank], seconds, seconds / slowdown * others)
            )
        return found
