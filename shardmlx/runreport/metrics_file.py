"""Read the metrics file of a run: one JSON object a line, with its ``event``. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardmlx.errors import UserError

T = TypeVar("T")

Event = dict[str, Any]
"""A line of a metrics file: the kind of the ``event``, and its values."""

KNOWN = frozenset({"start", "train", "val", "test", "checkpoint", "resume", "straggler", "summary"})
"""Events that a run writes; others are ignored."""

_UNDONE = frozenset({"train", "val", "checkpoint", "straggler"})
"""Events of a step, which are undone if a run resumes from an earlier one."""

MOST_REPORTS = 5000
"""Limit of training reports shown for a run; beyond it, every second one goes, again and again."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The events of a metrics file, in order, and the number of its ``unreadable`` lines."""

    events: tuple[Event, ...]
    unreadable: int = 0


def read_metrics(path: str | Path) -> Metrics:
    """Read a file that ``train --metrics-file`` wrote, or is still writing.

    Lines that are not JSON objects with an event, and with a number for its step if it has one, are
    counted and left out, such as the last one of a killed run. Raises ``UserError`` if the file
    cannot be read or has no event.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            f"metrics file {path} cannot be read: {error.strerror or error}",
            "name the file that train --metrics-file wrote",
        ) from None
    parsed = [_parse(line) for line in lines if line.strip()]
    events = [event for event in parsed if event is not None]
    metrics = Metrics(
        tuple(event for event in events if event["event"] in KNOWN), len(parsed) - len(events)
    )
    if not metrics.events:
        raise UserError(
            f"{path} has no metrics of a run in its {len(parsed)} lines",
            "name the file that train --metrics-file wrote",
        )
    return metrics


def _parse(line: bytes) -> Event | None:
    try:
        # JSON has no NaN and no Infinity, and a browser would refuse them.
        event = json.loads(line, parse_constant=lambda name: None, parse_float=_number)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if not isinstance(event.get("step", 0), int):
        return None
    return event


def _number(text: str) -> float | None:
    number = float(text)
    return number if abs(number) != float("inf") else None


def current(events: Iterable[Event]) -> list[Event]:
    """Return the valid events: those of the last run, without undone ones.

    A resumed run continues in the file, and repeats the reports after the step from which it
    resumes. Its ``resume`` event gets the number of ``repeated_steps``. A ``start`` at step 0
    begins another run, as in concatenated files.
    """
    kept: list[Event] = []
    for event in events:
        if event["event"] == "start" and not _step(event):
            kept = []
        if event["event"] == "resume" and "step" in event:
            step = _step(event)
            done = [_step(each) for each in kept if each["event"] == "train"]
            event = {**event, "repeated_steps": max(0, max(done, default=step) - step)}
            kept = [each for each in kept if not _is_undone(each, step)]
        kept.append(event)
    return thinned(kept)


def _step(event: Event) -> int:
    return int(event.get("step", 0))


def _is_undone(event: Event, step: int) -> bool:
    if event["event"] in ("summary", "test"):
        return True
    return event["event"] in _UNDONE and _step(event) > step


def thinned(events: list[Event], most: int = MOST_REPORTS) -> list[Event]:
    """Return the events with every second report left out, again and again, until at most ``most``
    are left; the last report stays."""

    def is_report(event: Event) -> bool:
        return bool(event["event"] == "train")

    while sum(map(is_report, events)) > most:
        events = halved(events, is_report)
    return events


def halved(items: Sequence[T], is_report: Callable[[T], bool]) -> list[T]:
    """Return the items without every second report, counted from the last one, which stays."""
    kept, is_kept = [], True
    for each in reversed(items):
        if is_kept or not is_report(each):
            kept.append(each)
        is_kept ^= is_report(each)
    return kept[::-1]
