"""Draw a schedule in time, with letters for a terminal. No MLX, no MPI."""

from __future__ import annotations

import math

from shardmlx.pipeline.actions import Kind
from shardmlx.pipeline.simulate import Simulation

_LONGEST = 8  # longest drawn action, in shortest ones


def timeline(simulation: Simulation, width: int = 160) -> str:
    """Draw one row a rank, time to the right, dots where the rank idles.

    Each action is a cell, as wide as its time. A column is the time of the shortest action; longer
    actions end in dashes. If that takes more than ``width`` letters, each letter shows the kind of
    the action that the rank is at in the middle of that letter's time; B stands for I and W if a
    letter is longer than an action.
    """
    names = [f"r{rank}" for rank in range(len(simulation.spans))]
    if not simulation.makespan:
        return "\n".join(names)
    margin = len(names[-1]) + 1
    unit, column = _cell(simulation)
    note = []
    if margin + round(simulation.makespan / unit * column) <= width:
        rows = _cells(simulation, unit, column)
    else:
        letters = max(1, width - margin)
        rows = _letters(simulation, letters)
        note = [" " * margin + f"a letter is {simulation.makespan / letters:.3g}"]
    lines = [name.ljust(margin) + row for name, row in zip(names, rows, strict=True)]
    return "\n".join(line.rstrip() for line in [*lines, *note])


def _durations(simulation: Simulation) -> list[float]:
    return [end - start for spans in simulation.spans for _, start, end in spans if end > start]


def _cell(simulation: Simulation) -> tuple[float, int]:
    """Return the time of a column and its letters, enough for the label of every action."""
    durations = _durations(simulation)
    all_spans = [span for spans in simulation.spans for span in spans]
    unit = max(min(durations), max(durations) / _LONGEST)
    column = max(len(str(action)) for action, _, _ in all_spans) + 1
    starts = [start / unit for _, start, _ in all_spans]
    if any(abs(start - round(start)) > 1e-6 for start in starts):
        column += 1  # rounding to letters may cost one
    return unit, column


def _cells(simulation: Simulation, unit: float, column: int) -> list[str]:
    def position(time: float) -> int:
        return round(time / unit * column)

    def idle(letters: int) -> str:
        return (".".ljust(column) * letters)[: letters - 1].ljust(letters) if letters else ""

    rows = []
    for spans in simulation.spans:
        cells, reached = [], 0
        for action, start, end in spans:
            first, last = position(start), position(end)
            label = str(action)
            if len(label) >= last - first:  # shorter than a column
                label = action.kind.value
            if last - first > 1.5 * column:
                label = label.ljust(last - first - 1, "-")
            cells += [idle(first - reached), label.ljust(last - first)[: last - first]]
            reached = last
        cells.append(idle(position(simulation.makespan) - reached))
        rows.append("".join(cells))
    return rows


def _letters(simulation: Simulation, letters: int) -> list[str]:
    unit = simulation.makespan / letters
    letter = {kind: kind.value for kind in Kind}
    if unit > min(_durations(simulation)):
        letter |= {Kind.I: Kind.B.value, Kind.W: Kind.B.value}  # either would be chance
    rows = []
    for spans in simulation.spans:
        row = ["."] * letters
        for action, start, end in spans:
            first, last = (math.ceil(time / unit - 0.5) for time in (start, end))
            row[first:last] = letter[action.kind] * (last - first)
        rows.append("".join(row))
    return rows
