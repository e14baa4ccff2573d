"""Measure a run: where each rank's time goes, its memory, and a trace of its actions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from shardmlx.common.process_memory import peak_resident_bytes
from shardmlx.distributed.transport import Transport

clock = time.monotonic

TRACED_STEPS = 50
"""Number of first steps in a trace file, few enough to open it."""

CLOCK_ROUNDS = 5
"""Round trips that compare the clocks of two ranks."""


class Span(StrEnum):
    """The use of a stretch of time."""

    COMPUTE = "compute"
    RECEIVE = "receive"  # from the start of waiting for a message until it is there
    SEND = "send"  # posting a message
    REDUCE = "reduce"  # waiting for sums over replicas
    GATHER = "gather"  # waiting for weights of other replicas, while computing
    UPDATE = "update"  # the optimizer
    STEP = "step"  # a whole step


class Event(NamedTuple):
    """A stretch of one rank's time, in seconds of that rank's clock.

    ``key`` names the message of a SEND or RECEIVE, or the sum of a REDUCE or GATHER: the same on
    all ranks that take part.
    """

    span: Span
    label: str
    start: float
    end: float
    key: tuple[int, ...] = ()


@dataclass(slots=True)
class Recorder:
    """The events of one rank, in the order in which they ended."""

    events: list[Event] = field(default_factory=list)

    @contextmanager
    def span(self, span: Span, label: str, key: tuple[int, ...] = ()) -> Iterator[None]:
        """Record the time of the work in this context."""
        start = clock()
        yield
        self.events.append(Event(span, label, start, clock(), key))

    def take(self) -> list[Event]:
        """Return the events so far, and start anew."""
        events, self.events = self.events, []
        return events


class RankTimes(NamedTuple):
    """Seconds of one rank. Compute, exposed communication and idle add up to ``step_seconds``."""

    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    exposed_comm_seconds: float = 0.0

    @property
    def idle_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.compute_seconds - self.exposed_comm_seconds)

    def mean(self, steps: int) -> RankTimes:
        """Return the times of a mean step, where these are of ``steps`` steps."""
        return RankTimes(*(seconds / steps for seconds in self))

    @property
    def bubble(self) -> float:
        """Part of the step in which the rank waited for others to compute."""
        return self.idle_seconds / self.step_seconds if self.step_seconds else 0.0


def rank_times(events: Sequence[Sequence[Event]], offsets: Sequence[float]) -> list[RankTimes]:
    """Sum up the events of each rank.

    A wait for a message counts as exposed communication from the message's sending on, a wait for a
    sum from the arrival of the last rank on; before, it is idle. ``offsets[r]`` added to rank r's
    clock gives rank 0's.
    """
    ready: dict[tuple[int, ...], float] = {}
    for mine, offset in zip(events, offsets, strict=True):
        for event in mine:
            if event.span in (Span.SEND, Span.REDUCE, Span.GATHER):
                start = event.start + offset
                ready[event.key] = max(start, ready.get(event.key, start))
    times = []
    for mine, offset in zip(events, offsets, strict=True):
        seconds = dict.fromkeys(Span, 0.0)
        exposed = 0.0
        for event in mine:
            seconds[event.span] += event.end - event.start
            if event.span in (Span.RECEIVE, Span.REDUCE, Span.GATHER):
                end = event.end + offset
                exposed += max(0.0, end - max(ready.get(event.key, end), event.start + offset))
        times.append(
            RankTimes(
                seconds[Span.STEP],
                seconds[Span.COMPUTE] + seconds[Span.UPDATE] - seconds[Span.GATHER],
                exposed,
            )
        )
    return times


def write_chrome_trace(
    path: Path, of_ranks: Sequence[tuple[Sequence[Event], float]], names: Sequence[str]
) -> None:
    """Write each rank's events, with the offset of its clock, as Chrome trace events: they open in
    Perfetto and chrome://tracing."""
    records: list[dict[str, object]] = []
    for rank, ((events, offset), name) in enumerate(zip(of_ranks, names, strict=True)):
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        records += [
            {
                "ph": "X",
                "pid": rank,
                # A row each for steps, for the spans within them, and for sends.
                "tid": {Span.STEP: 0, Span.SEND: 2}.get(event.span, 1),
                "name": event.label,
                "cat": event.span.value,
                "ts": round((event.start + offset) * 1e6, 1),
                "dur": round((event.end - event.start) * 1e6, 1),
            }
            for event in events
        ]
    path.write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}))


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank: its mean step since the last report, and its peak memory so far.

    ``peak_memory_bytes`` counts MLX's arrays, ``process_peak_bytes`` the whole process, and
    ``active_memory_bytes`` the arrays that stay between steps.
    """

    rank: int
    times: RankTimes
    peak_memory_bytes: int
    process_peak_bytes: int
    active_memory_bytes: int

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
            "active_memory_bytes": self.active_memory_bytes,
        }


class Window(NamedTuple):
    """The events of one rank since its last report, what to add to its clock to get rank 0's, and
    its bytes of memory: the peaks of MLX and of the process, and what is there now."""

    events: list[Event]
    offset: float
    memory: tuple[int, int, int]


Traced = tuple[list[Event], float]
"""The events of one rank that are traced, and what to add to its clock to get rank 0's."""


@dataclass(slots=True)
class Meter:
    """The meter of a run on one rank, which takes the events of ``recorder``. All ranks must build
    it at the same time."""

    transport: Transport
    recorder: Recorder
    trace: Path | None = None
    _offset: float = 0.0
    _window: list[Event] = field(default_factory=list)
    _traced: list[Event] = field(default_factory=list)
    _first_step: int = 0

    def __post_init__(self) -> None:
        self._offset = clock_offset(self.transport)

    def start_after(self, step: int) -> None:
        """Count from the step after ``step`` on."""
        self._first_step = step

    def count(self, step: int, *, is_training: bool = True) -> None:
        """Count the events since the last call to training step ``step``, unless they are others,
        such as validation's."""
        events = self.recorder.take()
        if is_training:
            self._window += events
        if self.trace is not None and step - self._first_step <= TRACED_STEPS:
            self._traced += events

    def window(self) -> Window:
        """Return what was counted since the last call."""
        events, self._window = self._window, []
        memory = mx.get_peak_memory(), peak_resident_bytes(), mx.get_active_memory()
        return Window(events, self._offset, memory)

    def traced(self) -> Traced:
        """Return the events of the trace."""
        return self._traced, self._offset


@dataclass(slots=True)
class Totals:
    """The measurements of the meters of all ranks, on rank 0."""

    _first_step: int = 0
    _reported_step: int = 0
    _total: list[RankTimes] = field(default_factory=list)
    _memory: list[tuple[int, int, int]] = field(default_factory=list)

    def start_after(self, step: int) -> None:
        """Count from the step after ``step`` on."""
        self._first_step = self._reported_step = step

    def add(self, step: int, windows: Sequence[Window]) -> list[RankReport]:
        """Return each rank's mean step since the last report, up to ``step``."""
        steps, self._reported_step = step - self._reported_step, step
        times = rank_times([each.events for each in windows], [each.offset for each in windows])
        before = self._total or [RankTimes()] * len(times)
        self._total = [
            RankTimes(*map(sum, zip(a, b, strict=True))) for a, b in zip(before, times, strict=True)
        ]
        self._memory = [each.memory for each in windows]
        return _reports(times, self._memory, steps)

    def summary(self) -> list[RankReport]:
        """Return the mean step of each rank over all reports so far."""
        return _reports(self._total, self._memory, self._reported_step - self._first_step)


def _reports(
    times: Sequence[RankTimes], memories: Sequence[tuple[int, int, int]], steps: int
) -> list[RankReport]:
    return [
        RankReport(rank, each.mean(steps), *memory)
        for rank, (each, memory) in enumerate(zip(times, memories, strict=True))
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
