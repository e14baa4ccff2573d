"""Choose the reports that the page of a long run shows. No MLX, no MPI.

A curve is a thousand pixels wide: of each stretch of steps the extremes are all that one sees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


def thinned(events: Iterable[Event]) -> list[Event]:
    """Return the events with at most ``MOST`` of each kind: the first, the last, and extremes of
    equal stretches of steps. ``events`` are iterated over more than once, and never all held.

    An event ``left_out`` then says how many reports there were, and has each rank's sums over the
    steps of those that were left out; a report that is shown says how many ``steps`` it is of.
    """
    facts = _Facts.of(events)
    most = dict.fromkeys(EXTREMES, MOST)
    most["train"] = min(MOST, MOST_PARTS // max(1, facts.ranks))
    if all(facts.counts[kind] <= most[kind] for kind in EXTREMES):
        return list(events)
    choices = {
        kind: _Choice(kind, facts.ends[kind], most[kind])
        for kind in EXTREMES
        if facts.counts[kind] > most[kind]
    }
    gone = _LeftOut()
    kept: list[tuple[int, Event]] = []
    for number, event in enumerate(_with_steps(events)):
        if event["event"] == "left_out":
            gone.take(event)
        elif event["event"] in choices:
            kept += choices[event["event"]].take(number, event, gone)
        else:
            kept.append((number, event))
    for choice in choices.values():
        kept += choice.chosen(gone, is_last=True)
    kept.sort(key=lambda each: each[0])
    return [*(event for _, event in kept), gone.event()]


@dataclass
class _Facts:
    """Counts of the events of each kind that may be thinned, the steps of the first and the last,
    and the most ranks of a report."""

    counts: Counter[str] = field(default_factory=Counter)
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    ranks: int = 0

    @classmethod
    def of(cls, events: Iterable[Event]) -> _Facts:
        facts = cls()
        for event in events:
            kind = event["event"]
            facts.ranks = max(facts.ranks, len(_ranks(event)))
            if kind in EXTREMES:
                step = _step(event)
                facts.counts[kind] += 1
                facts.ends[kind] = facts.ends.get(kind, (step, step))[0], step
        return facts


class _LeftOut:
    """The reports that are left out: their number, and each rank's sums over their steps."""

    def __init__(self) -> None:
        self._reports = 0
        self._sums: dict[int, dict[str, float]] = {}

    def add(self, report: Event) -> None:
        """Leave out a report."""
        self._reports += 1
        for part in _ranks(report):
            if isinstance(part, dict) and isinstance(part.get("rank"), int):
                total = self._sums.setdefault(part["rank"], {"rank": part["rank"]})
                _add(total, part, report["steps"])

    def take(self, before: Event) -> None:
        """Take in the event of reports that were left out before."""
        self._reports += before["reports"]
        for part in before["ranks"]:
            total = self._sums.setdefault(part["rank"], {"rank": part["rank"]})
            for name in part.keys() - {"rank"}:
                total[name] = total.get(name, 0) + part[name]

    def event(self) -> Event:
        """Return the event that tells of them."""
        return {
            "event": "left_out",
            "reports": self._reports,
            "ranks": [*self._sums.values()],
        }


class _Choice:
    """The choice of events of one kind, as they come: of the first and the last, at the steps
    ``ends``, and of ``extremes`` of as many equal stretches as make ``most`` of them all."""

    def __init__(self, kind: str, ends: tuple[int, int], most: int) -> None:
        self._extremes = EXTREMES[kind]
        self._first = ends[0]
        self._width = max(1, ends[1] - ends[0] + 1) / max(1, (most - 2) // len(self._extremes))
        self._place = 0
        self._stretch: list[tuple[int, Event]] = []
        self._has_first = False

    def take(self, number: int, event: Event, gone: _LeftOut) -> list[tuple[int, Event]]:
        """Take in an event; return what is chosen of the stretch that it ends."""
        place = math.floor((_step(event) - self._first) / self._width)
        chosen = [] if place == self._place else self.chosen(gone)
        self._place = place
        self._stretch.append((number, event))
        return chosen

    def chosen(self, gone: _LeftOut, *, is_last: bool = False) -> list[tuple[int, Event]]:
        """Return what is chosen of the events of a stretch; its other reports are ``gone``."""
        stretch = self._stretch
        self._stretch = []
        if not stretch:
            return []
        chosen = {self._extreme(stretch, *each) for each in self._extremes}
        if not self._has_first:
            chosen.add(stretch[0][0])
            self._has_first = True
        if is_last:
            chosen.add(stretch[-1][0])
        for number, event in stretch:
            if number not in chosen and event["event"] == "train":
                gone.add(event)
        return [each for each in stretch if each[0] in chosen]

    def _extreme(
        self, stretch: Sequence[tuple[int, Event]], extreme: Callable[..., Any], name: str
    ) -> int:
        """Return the number of the event with the extreme of a value. One that is not finite is
        written as none, and seen as a gap."""
        known = [each for each in stretch if isinstance(each[1].get(name), int | float)]
        number: int = (extreme(known, key=lambda each: each[1][name]) if known else stretch[0])[0]
        return number


def _ranks(event: Event) -> list[Any]:
    ranks = event.get("ranks")
    return ranks if isinstance(ranks, list) else []


def _with_steps(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, of which each report says of how many ``steps`` it is."""
    last: int | None = None
    for event in events:
        if event["event"] == "start" and last is None:
            last = event.get("step") or 0
        if event["event"] == "train" and "step" in event:
            begun = last or 0
            steps = event["step"] - begun if event["step"] > begun else event["step"]
            event = {"steps": steps, **event}
            last = event["step"]
        yield event


def _step(event: Event) -> int:
    step: int = event.get("step", 0)
    return step


def _add(total: dict[str, float], part: Mapping[str, Any], steps: int) -> None:
    """Add a rank's part of a report of so many steps to its sums; ``X_steps`` are those of X."""
    for name in SUMMED:
        value = part.get(name)
        if isinstance(value, int | float):
            total[name] = total.get(name, 0.0) + steps * value
            total[f"{name}_steps"] = total.get(f"{name}_steps", 0) + steps
