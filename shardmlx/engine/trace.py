"""Record a rank's actions in time, sum them up, and write them as a trace. No MLX, no MPI."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

clock = time.monotonic


class Span(StrEnum):
    """The use of a stretch of time."""

    COMPUTE = "compute"
    RECEIVE = "receive"  # from the start of waiting for a message until it is there
    SEND = "send"  # the moment at which a message was posted
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

    def mark(self, span: Span, label: str, key: tuple[int, ...] = ()) -> None:
        """Record a moment."""
        now = clock()
        self.events.append(Event(span, label, now, now, key))

    def take(self) -> list[Event]:
        """Return the events so far, and start anew."""
        events, self.events = self.events, []
        return events


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of one rank. Compute, exposed communication and idle add up to ``step_seconds``."""

    step_seconds: float
    compute_seconds: float
    exposed_comm_seconds: float

    @property
    def idle_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.compute_seconds - self.exposed_comm_seconds)

    def __add__(self, other: RankTimes) -> RankTimes:
        return RankTimes(
            self.step_seconds + other.step_seconds,
            self.compute_seconds + other.compute_seconds,
            self.exposed_comm_seconds + other.exposed_comm_seconds,
        )

    def mean(self, steps: int) -> RankTimes:
        """Return the times of a mean step, where these are of ``steps`` steps."""
        return RankTimes(
            self.step_seconds / steps,
            self.compute_seconds / steps,
            self.exposed_comm_seconds / steps,
        )

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
    path: Path,
    events: Iterable[tuple[int, Event]],
    offsets: Sequence[float],
    names: Mapping[int, str],
) -> None:
    """Write (rank, event) pairs as Chrome trace events: opens in Perfetto and chrome://tracing."""
    records: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        for rank, name in names.items()
    ]
    for rank, event in events:
        start = event.start + offsets[rank]
        records.append(
            {
                "ph": "X",
                "pid": rank,
                # A row each for steps, for the spans within them, and for sends.
                "tid": {Span.STEP: 0, Span.SEND: 2}.get(event.span, 1),
                "name": event.label,
                "cat": event.span.value,
                "ts": round(start * 1e6, 1),
                "dur": round((event.end - event.start) * 1e6, 1),
            }
        )
    path.write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}))
