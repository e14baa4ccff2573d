"""Read the metrics file of a run: one JSON object a line, with its ``event``. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError, file_access

Event = dict[str, Any]
"""A line of a metrics file: the kind of the ``event``, and its values."""

KNOWN = frozenset({"start", "train", "val", "test", "checkpoint", "resume", "straggler", "summary"})
"""Events that a run writes; others are ignored."""


def read_metrics(path: str | Path) -> list[Event]:
    """Return the events that ``train --metrics-file`` wrote, without unreadable lines: no JSON
    objects with an event, and a number for a step, like the last one of a killed run. Raises
    ``UserError`` if the file cannot be read or has no event."""
    path = Path(path)
    remedy = "name the file that train --metrics-file wrote"
    with file_access("read metrics file", path, remedy):
        lines = path.read_bytes().splitlines()
    events = [event for event in map(_parse, lines) if event and event["event"] in KNOWN]
    if not events:
        raise UserError(f"{path} has no metrics of a run in its {len(lines)} lines", remedy)
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
    kept: list[Event] = []
    for event in events:
        if event["event"] == "start" and not event.get("step"):
            kept = []
        if event["event"] == "resume" and "step" in event:
            step = event["step"]
            done = [each["step"] for each in kept if each["event"] == "train"]
            event = {**event, "repeated_steps": max(0, max(done, default=step) - step)}
            kept = [
                each
                for each in kept
                if each["event"] not in ("summary", "test") and each.get("step", 0) <= step
            ]
        kept.append(event)
    return kept
