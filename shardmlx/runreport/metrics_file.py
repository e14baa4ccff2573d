"""Read the metrics file of a run: one JSON object a line, with its ``event``. No MLX, no MPI."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError, file_access

Event = dict[str, Any]
"""A line of a metrics file: the kind of the ``event``, and its values."""

KNOWN = frozenset(
    {"start", "train", "val", "test", "checkpoint", "resume", "straggler", "stop", "summary"}
)
"""Events that a run writes; others are ignored."""


def read_metrics(path: str | Path) -> list[Event]:
    """Return the events that ``train --metrics-file`` wrote, without unreadable lines: no JSON
    objects with an event, and a number for a step, like the last one of a killed run. Raises
    ``UserError`` if the file cannot be read or has no event."""
    path = Path(path)
    remedy = "name the file that train --metrics-file wrote"
    lines = 0
    events = []
    with file_access("read metrics file", path, remedy), path.open("rb") as file:
        for line in file:
            lines += 1
            event = _parse(line)
            if event is not None and event["event"] in KNOWN:
                events.append(event)
    if not events:
        raise UserError(f"{path} has no metrics of a run in its {lines} lines", remedy)
    return events


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


def current(events: Iterable[Event]) -> list[Event]:
    """Return the valid events: of the last run, which a ``start`` at step 0 begins, without those
    that a resumed run repeats. A ``resume`` event gets the number of ``repeated_steps``."""
    kept = []
    limit = math.inf  # the earliest step from which a later resume makes steps again
    for event in reversed(_with_repeated_steps(events)):
        is_of_an_end = event["event"] in ("summary", "test", "stop")
        if event.get("step", 0) <= limit and not (is_of_an_end and limit < math.inf):
            kept.append(event)
        if event["event"] == "resume":
            limit = min(limit, event.get("step", math.inf))
    return kept[::-1]


def _with_repeated_steps(events: Iterable[Event]) -> list[Event]:
    """Return the events of the last run. Each ``resume`` says how many steps before it are made
    again."""
    told: list[Event] = []
    done: list[int] = []  # steps of reports that hold
    for event in events:
        if event["event"] == "start" and not event.get("step"):
            told.clear()
            done.clear()
        if event["event"] == "train" and "step" in event:
            done.append(event["step"])
        if event["event"] == "resume" and "step" in event:
            last = done[-1] if done else event["step"]
            event = {**event, "repeated_steps": max(0, last - event["step"])}
            while done and done[-1] > event["step"]:
                done.pop()
        told.append(event)
    return told
