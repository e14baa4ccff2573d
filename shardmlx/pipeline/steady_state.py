"""Tell how long a step of many micro-batches takes, from steps of fewer. No MLX, no MPI.

A rank that has filled its part of the pipeline does the same over and over. The end of an action
depends on ends of actions a few micro-batches before it, and on nothing else. So once each rank
ends each such period as much later as the one before, the slowest does so until the pipeline
drains, and none becomes slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import isclose

from shardmlx.pipeline.actions import Kind
from shardmlx.pipeline.simulate import Simulation, Span

TOLERANCE = 1e-9
"""Share of a period by which two may differ and count as equal."""


def makespan(
    microbatches: int,
    fewest: int,
    period: int,
    placement: Sequence[int],
    occupied: Sequence[Sequence[float]],
    simulated: Callable[[int], Simulation],
) -> float:
    """Return the seconds of a step, by the number of its micro-batches.

    ``simulated`` takes another number, from ``fewest`` on, whose order repeats itself with each
    ``period`` of micro-batches; ``occupied[a][b]`` is how long a message takes the link between two
    ranks. Where times do not settle, the whole step is simulated.
    """
    few = fewest + 4 * len(occupied)
    while few + period * len(occupied) < microbatches:
        step = simulated(few)
        # Where ranks wait for messages, times repeat with each round of those under way.
        for longer in accumulate([period] * len(occupied)):
            seconds = _settled(step, longer, placement, occupied)
            if seconds is None:
                continue
            start = few + (microbatches - few) % longer
            first = step if start == few else simulated(start)
            # A step is as long as the longest chain of actions in it: what each further period adds
            # never becomes less, and is not more than the slowest rank's.
            added = simulated(start + longer).makespan - first.makespan
            if isclose(added, seconds, rel_tol=TOLERANCE):
                return first.makespan + (microbatches - start) // longer * seconds
        few += few - fewest
    return simulated(microbatches).makespan


def _settled(
    step: Simulation, period: int, placement: Sequence[int], occupied: Sequence[Sequence[float]]
) -> float | None:
    """Return by how much the slowest rank ends a period later than the one before; None if that
    varies for any rank, or if a link is slower."""
    later = [_later(spans, period) for spans in step.spans]
    if not all(later):
        return None
    slowest = max(map(max, later))
    tolerated = TOLERANCE * slowest
    if any(max(each) - min(each) > tolerated for each in later):
        return None
    backward = {
        action.stage for spans in step.spans for action, _, _ in spans if action.kind is not Kind.F
    }
    ways = []
    for stage, (below, above) in enumerate(pairwise(placement)):
        ways.append((below, above))
        if stage in backward:
            ways.append((above, below))
    # Messages that queue up for a slow link come too late in the end. A rank that is faster than
    # one that it waits for has work ahead: it becomes as slow when it has none, and not slower.
    if any(period * ways.count((a, b)) * occupied[a][b] > slowest + tolerated for a, b in ways):
        return None
    return slowest


def _later(spans: Sequence[Span], period: int) -> list[float]:
    """Return how much later than a period before each action of a rank ends, of the last that
    repeat that period one after the other, as many as it has; none if fewer do."""
    length = len({(action.stage, action.kind) for action, _, _ in spans}) * period
    # While the pipeline drains, an action may repeat another by chance.
    together = 0
    for start in reversed(range(length, len(spans))):
        together = together + 1 if _repeats(spans[start - length], spans[start], period) else 0
        if together == length:
            return [spans[i][2] - spans[i - length][2] for i in range(start, start + length)]
    return []


def _repeats(before: Span, span: Span, period: int) -> bool:
    stage, kind, microbatch = before[0]
    return span[0] == (stage, kind, microbatch + period)
