"""Choose the reports that the page of a long run shows. No MLX, no MPI.

A curve is a thousand pixels wide: of each stretch of steps the extremes are all that one sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardmlx.runreport.metrics_file import Event

MOST = 2000
"""Events of a kind that a page shows."""

MOST_PARTS = 8000
"""Ranks' parts of reports that a page shows."""

EXTREMES: Mapping[str, Sequence[tuple[Callable[..., Event], str]]] = {
    "train": ((min, "loss"), (max, "loss"), (max, "grad_norm"), (max, "step_seconds")),
    "val": ((min, "loss"), (max, "loss")),
    "checkpoint": ((max, "exposed_seconds"),),
}
"""The extremes of a stretch that are shown, by kind of events: of these values."""

SUMMED = ("compute_seconds", "exposed_comm_seconds", "idle_seconds")
"""Values of a rank of which the page shows the mean of all steps."""


def thinned(events: Sequence[Event]) -> list[Event]:
    """Return the events with at most ``MOST`` of each kind: the first, the last, and extremes of
    equal stretches of steps.

    An event ``left_out`` then says how many reports there were, and has each rank's sums over the
    steps of those that were left out; a report that is shown says how many ``steps`` it is of.
    """
    counts = {kind: sum(event["event"] == kind for event in events) for kind in EXTREMES}
    ranks = max((len(_ranks(event)) for event in events), default=0)
    most = dict.fromkeys(EXTREMES, MOST)
    most["train"] = min(MOST, MOST_PARTS // max(1, ranks))
    if all(count <= most[kind] for kind, count in counts.items()):
        return list(events)
    told = _with_steps(events)
    shown: set[int] = set()
    for kind in EXTREMES:
        of_kind = [event for event in told if event["event"] == kind]
        shown.update(
            map(id, of_kind if counts[kind] <= most[kind] else _chosen(of_kind, most[kind]))
        )
    kept = [event for event in told if event["event"] not in EXTREMES or id(event) in shown]
    before = [event for event in kept if event["event"] == "left_out"]
    gone = [event for event in told if event["event"] == "train" and id(event) not in shown]
    return [*(event for event in kept if event["event"] != "left_out"), _left_out(before, gone)]


def _ranks(event: Event) -> list[Any]:
    ranks = event.get("ranks")
    return ranks if isinstance(ranks, list) else []


def _with_steps(events: Sequence[Event]) -> list[Event]:
    """Return the events, of which each report says of how many ``steps`` it is."""
    told = []
    last = next((event.get("step") or 0 for event in events if event["event"] == "start"), 0)
    for event in events:
        if event["event"] == "train" and "step" in event:
            steps = event["step"] - last if event["step"] > last else event["step"]
            event = {"steps": steps, **event}
            last = event["step"]
        told.append(event)
    return told


def _chosen(events: Sequence[Event], most: int) -> list[Event]:
    """Return the first and the last of these events of one kind, and extremes of as many equal
    stretches as make ``most`` of them all."""
    extremes = EXTREMES[events[0]["event"]]
    first = _step(events[0])
    width = max(1, _step(events[-1]) - first + 1) / max(1, (most - 2) // len(extremes))
    stretches: dict[int, list[Event]] = {}
    for event in events:
        stretches.setdefault(math.floor((_step(event) - first) / width), []).append(event)
    chosen = [events[0], events[-1]]
    for stretch in stretches.values():
        for extreme, name in extremes:
            known = [event for event in stretch if isinstance(event.get(name), int | float)]
            if known:
                chosen.append(extreme(known, key=lambda event: event[name]))
            else:
                # A value that is not finite is written as none, and seen as a gap.
                chosen.append(stretch[0])
    return chosen


def _step(event: Event) -> int:
    step: int = event.get("step", 0)
    return step


def _left_out(before: Sequence[Event], gone: Sequence[Event]) -> Event:
    """Return the event for reports that are left out now, and were ``before``."""
    sums: dict[int, dict[str, float]] = {}
    for event in before:
        for part in event["ranks"]:
            sums[part["rank"]] = dict(part)
    for event in gone:
        for part in _ranks(event):
            if isinstance(part, dict) and isinstance(part.get("rank"), int):
                _add(sums.setdefault(part["rank"], {"rank": part["rank"]}), part, event["steps"])
    reports = sum(event["reports"] for event in before) + len(gone)
    return {"event": "left_out", "reports": reports, "ranks": list(sums.values())}


def _add(total: dict[str, float], part: Mapping[str, Any], steps: int) -> None:
    """Add a rank's part of a report of so many steps to its sums; ``X_steps`` are those of X."""
    for name in SUMMED:
        value = part.get(name)
        if isinstance(value, int | float):
            total[name] = total.get(name, 0.0) + steps * value
            total[f"{name}_steps"] = total.get(f"{name}_steps", 0) + steps
