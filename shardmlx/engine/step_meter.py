"""Measure a run: where each rank's time goes, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardmlx.common.process_memory import peak_resident_bytes
from shardmlx.distributed.transport import Transport
from shardmlx.engine.trace import Event, RankTimes, Recorder, clock, rank_times, write_chrome_trace

TRACED_STEPS = 50
"""Number of first steps in a trace file, few enough to open it."""

CLOCK_ROUNDS = 5
"""Round trips that compare the clocks of two ranks."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank: its mean step since the last report, and its peak memory so far.

    ``peak_memory_bytes`` counts MLX's arrays, ``process_peak_bytes`` the whole process.
    """

    rank: int
    times: RankTimes
    peak_memory_bytes: int
    process_peak_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the rank's part of the metrics."""
        return {
            "rank": self.rank,
            "compute_seconds": round(self.times.compute_seconds, 6),
            "exposed_comm_seconds": round(self.times.exposed_comm_seconds, 6),
            "idle_seconds": round(self.times.idle_seconds, 6),
            "bubble": round(self.times.bubble, 4),
            "peak_memory_bytes": self.peak_memory_bytes,
            "process_peak_bytes": self.process_peak_bytes,
        }


@dataclass(slots=True)
class Meter:
    """The meter of a run: takes the events of ``recorder``, and gathers them on rank 0.

    Building it, ``report`` and ``write_trace`` are collective.
    """

    transport: Transport
    recorder: Recorder
    trace: Path | None = None
    _offset: float = 0.0
    _window: list[Event] = field(default_factory=list)
    _traced: list[Event] = field(default_factory=list)
    _first_step: int = 0
    _last_step: int = 0
    _reported_step: int = 0
    _total: list[RankTimes] = field(default_factory=list)
    _peaks: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._offset = clock_offset(self.transport)

    def start_after(self, step: int) -> None:
        """Count from the step after ``step`` on."""
        self._first_step = self._last_step = self._reported_step = step

    def count(self, step: int) -> None:
        """Count the events since the last call to training step ``step``."""
        events = self.recorder.take()
        self._window += events
        self._last_step = step
        self._keep(step, events)

    def skip(self, step: int) -> None:
        """Leave out the events since the last call, such as validation's."""
        self._keep(step, self.recorder.take())

    def _keep(self, step: int, events: Sequence[Event]) -> None:
        if self.trace is not None and step - self._first_step <= TRACED_STEPS:
            self._traced += events

    def report(self, extra: Any = None) -> tuple[list[RankReport], list[Any]] | None:
        """Return, on rank 0, each rank's mean step since the last report, and its ``extra``."""
        window, self._window = self._window, []
        steps, self._reported_step = self._last_step - self._reported_step, self._last_step
        gathered = self.transport.gather(
            (window, self._offset, (mx.get_peak_memory(), peak_resident_bytes()), extra),
            what="report",
        )
        if gathered is None:
            return None
        events, offsets, peaks, extras = zip(*gathered, strict=True)
        times = rank_times(events, offsets)
        before = self._total or [RankTimes(0.0, 0.0, 0.0)] * len(times)
        self._total = [a + b for a, b in zip(before, times, strict=True)]
        self._peaks = list(peaks)
        return _reports(times, peaks, steps), list(extras)

    def summary(self) -> list[RankReport]:
        """Return, on rank 0, the mean step of each rank over all reports so far."""
        return _reports(self._total, self._peaks, self._reported_step - self._first_step)

    def write_trace(self) -> None:
        """Write the trace of all ranks, if one was asked for."""
        if self.trace is None:
            return
        gathered = self.transport.gather((self._traced, self._offset), what="trace")
        if gathered is not None:
            self.trace.parent.mkdir(parents=True, exist_ok=True)
            write_chrome_trace(
                self.trace,
                ((rank, event) for rank, (events, _) in enumerate(gathered) for event in events),
                [offset for _, offset in gathered],
                {rank: self.transport.name(rank) for rank in range(self.transport.size)},
            )


def _reports(
    times: Sequence[RankTimes], peaks: Sequence[tuple[int, int]], steps: int
) -> list[RankReport]:
    return [
        RankReport(rank, each.mean(steps), *peak)
        for rank, (each, peak) in enumerate(zip(times, peaks, strict=True))
    ]


def clock_offset(transport: Transport) -> float:
    """Return the seconds to add to this rank's clock to get rank 0's. Collective.

    Rank 0's clock was read in the middle of the fastest of a few round trips (Cristian, 1989).
    Ranks on the host of rank 0 share its clock.
    """
    offset, fastest = 0.0, float("inf")
    for peer in range(1, transport.size):
        if transport.hosts[peer] == transport.hosts[0] or transport.rank not in (0, peer):
            continue
        for _ in range(CLOCK_ROUNDS):
            if transport.rank == 0:
                transport.receive_object(peer, "comparing clocks")
                transport.send_object(clock(), peer, "comparing clocks")
                continue
            start = clock()
            transport.send_object(None, 0, "comparing clocks")
            theirs = transport.receive_object(0, "comparing clocks")
            end = clock()
            if end - start < fastest:
                fastest, offset = end - start, theirs - (start + end) / 2
    return offset
