"""Draw a schedule in time, in letters for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from shardmlx.pipeline.simulate import Simulation, Span

_LONGEST = 8  # longest action in letters, in shortest ones


def timeline(simulation: Simulation, width: int = 160) -> str:
    """Draw one row a rank, time to the right, dots where the rank idles.

    Each action is a cell, as wide as its time. A column is the time of the shortest action; longer
    actions end in dashes. If that takes more than ``width`` letters, each letter is the kind of the
    action at that time.
    """
    names = [f"r{rank}" for rank in range(len(simulation.spans))]
    if not simulation.makespan:
        return "\n".join(names)
    margin = len(names[-1]) + 1
    spans = [span for of_rank in simulation.spans for span in of_rank]
    durations = [end - start for _, start, end in spans if end > start]
    unit = max(min(durations), max(durations) / _LONGEST)
    column = max(len(str(action)) for action, _, _ in spans) + 1
    if any(abs(start / unit - round(start / unit)) > 1e-6 for _, start, _ in spans):
        column += 1  # rounding to letters may cost one
    letters = round(simulation.makespan / unit * column)
    if letters > width - margin:
        letters, column = max(1, width - margin), 1
    rows = [_row(of_rank, letters, simulation.makespan, column) for of_rank in simulation.spans]
    return "\n".join(name.ljust(margin) + row for name, row in zip(names, rows, strict=True))


def _row(spans: Sequence[Span], letters: int, makespan: float, column: int) -> str:
    """Draw the actions of a rank, ``makespan`` as so many ``letters``."""
    row = ""
    for action, start, end in spans:
        row += _idle(round(start / makespan * letters) - len(row), column)
        room = max(0, round(end / makespan * letters) - len(row))
        label, kind = str(action), action.kind.value
        if column == 1:
            label = kind * room
        elif len(label) >= room:
            label = kind
        elif room > 1.5 * column:
            label = label.ljust(room - 1, "-")
        row += label.ljust(room)[:room]
    return (row + _idle(letters - len(row), column)).rstrip()


def _idle(letters: int, column: int) -> str:
    if column == 1:
        return "." * letters
    dots = ".".ljust(column) * letters
    return dots[: letters - 1].ljust(letters)
