"""A schedule in time, drawn with letters for a terminal."""

from __future__ import annotations

from shardmlx.simulate import Simulation

_LONGEST = 8  # no action is drawn wider than this many of the shortest


def timeline(simulation: Simulation) -> str:
    """One row a rank, time to the right, a cell for each action, dots where the rank idles.

    A column of cells is the time of the shortest action; longer actions end in dashes.
    """
    durations = [
        end - start for spans in simulation.spans for _, start, end in spans if end > start
    ]
    if not durations:
        return "\n".join(f"r{rank}" for rank in range(len(simulation.spans)))
    unit = max(min(durations), max(durations) / _LONGEST)
    labels = [str(action) for spans in simulation.spans for action, _, _ in spans]
    column = max(map(len, labels)) + 1
    starts = [start / unit for spans in simulation.spans for _, start, _ in spans]
    if any(abs(start - round(start)) > 1e-6 for start in starts):
        column += 1  # rounding to letters may cost one

    def position(time: float) -> int:
        return round(time / unit * column)

    width = position(simulation.makespan)
    idle = ".".ljust(column) * (width // column + 1)
    margin = len(f"r{len(simulation.spans) - 1} ")
    rows = []
    for rank, spans in enumerate(simulation.spans):
        row = list(idle[:width])
        for action, start, end in spans:
            first, last = position(start), position(end)
            label = str(action)
            if last - first > column:
                label = label.ljust(last - first - 1, "-")
            row[first:last] = label.ljust(last - first)[: last - first]
        rows.append(f"r{rank}".ljust(margin) + "".join(row).rstrip())
    return "\n".join(rows)
