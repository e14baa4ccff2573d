"""Read the metrics file of a run: one JSON object a line, with its ``event``. No MLX, no MPI."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError, file_access

Event = dict[str, Any]
"""A line of a metrics file: the kind of the ``event``, and its values."""

KNOWN = frozenset(
    {"start", "train", "val", "test", "checkpoint", "resume", "straggler", "stop", "summary"}
)
"""Events that a run writes; others are ignored."""

REMEDY = "name the file that train --metrics-file wrote"


class MetricsFile(Iterable[Event]):
    """The events of a file that hold, read anew each time that one asks for them, since those of a
    long run take ten times as many bytes as the file. Lines that come later are no part of it.

    Unreadable lines are left out: no JSON objects with an event, and a number for a step, like the
    last one of a killed run. Raises ``UserError`` if the file cannot be read or has no event.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        lines = 0
        self._size = 0
        restarts = []
        has_event = False
        with self._access(), self._path.open("rb") as file:
            for number, line in enumerate(file):
                lines += 1
                self._size += len(line)
                may_restart = b'"start"' in line or b'"resume"' in line
                if (may_restart or not has_event) and (event := _known(line)) is not None:
                    has_event = True
                    restarts.append((number, event))
        self._restarts = Restarts.among(restarts)
        if not has_event:
            raise UserError(f"{self._path} has no metrics of a run in its {lines} lines", REMEDY)

    def __iter__(self) -> Iterator[Event]:
        """Yield the events that hold."""
        return self._restarts.holding(self._numbered())

    def _numbered(self) -> Iterator[tuple[int, Event]]:
        """Yield known events, each with the number of its line."""
        left = self._size
        with self._access(), self._path.open("rb") as file:
            for number, line in enumerate(file):
                left -= len(line)
                if left < 0:
                    break
                event = _known(line)
                if event is not None:
                    yield number, event

    def _access(self) -> AbstractContextManager[None]:
        return file_access("read metrics file", self._path, REMEDY)


def _known(line: bytes) -> Event | None:
    """Return the event of a line, if it is one that a run writes."""
    event = _parse(line)
    return event if event is not None and event["event"] in KNOWN else None


def _parse(line: bytes) -> Event | None:
    try:
        # JSON has no NaN, and a browser would refuse it.
        event = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if not isinstance(event.get("step", 0), int):
        return None
    return event


@dataclass(frozen=True, slots=True)
class Restarts:
    """The beginning of the last run among numbered events, and its ``resumes``: pairs of the number
    and the step from which it makes steps again."""

    begin: int = 0
    resumes: tuple[tuple[int, float], ...] = ()

    @classmethod
    def among(cls, events: Iterable[tuple[int, Event]]) -> Restarts:
        """Find them: a ``start`` at step 0 begins a run."""
        begin = 0
        resumes: list[tuple[int, float]] = []
        for number, event in events:
            if event["event"] == "start" and not event.get("step"):
                begin = number
                resumes.clear()
            if event["event"] == "resume":
                resumes.append((number, event.get("step", math.inf)))
        return cls(begin, tuple(resumes))

    def holding(self, events: Iterable[tuple[int, Event]]) -> Iterator[Event]:
        """Yield the events that hold: of the last run, without those that a resumed run repeats. A
        ``resume`` gets the number of ``repeated_steps`` before it."""
        # The number of each resume, and the earliest step from which it or a later one goes on.
        limits: deque[tuple[int, float]] = deque()
        for number, step in reversed(self.resumes):
            limits.appendleft((number, min(step, limits[0][1] if limits else math.inf)))
        done = array("q")  # steps of reports that hold so far
        for number, event in events:
            if number < self.begin:
                continue
            if event["event"] == "train" and "step" in event:
                done.append(event["step"])
            if event["event"] == "resume":
                limits.popleft()
                event = _with_repeated_steps(event, done)
            limit = limits[0][1] if limits else math.inf
            is_of_an_end = event["event"] in ("summary", "test", "stop")
            if event.get("step", 0) <= limit and not (is_of_an_end and limit < math.inf):
                yield event


def current(events: Sequence[Event]) -> list[Event]:
    """Return the events that hold, as ``MetricsFile`` yields them."""
    return [*Restarts.among(enumerate(events)).holding(enumerate(events))]


def _with_repeated_steps(resume: Event, done: MutableSequence[int]) -> Event:
    """Say how many of the steps that were ``done`` a ``resume`` makes again; drop these."""
    if "step" not in resume:
        return resume
    step = resume["step"]
    last = done[-1] if done else step
    while done and done[-1] > step:
        done.pop()
    return {**resume, "repeated_steps": max(0, last - step)}
