"""When each action of a schedule would run: makespan, bubble and activations in flight."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.actions import Action, Grid, Kind
from shardmlx.errors import UserError

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W

Span = tuple[Action, float, float]
"""An action, its start and its end."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time for one micro-batch through all the stages of one rank, in any unit.

    A rank with v stages spends 1/v of it in each, so that schedules compare on the same model. A
    whole backward B costs ``input_gradient + weight_gradient``.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    def __post_init__(self) -> None:
        costs = (self.forward, self.input_gradient, self.weight_gradient)
        if not all(math.isfinite(cost) and cost >= 0 for cost in costs) or not any(costs):
            given = ",".join(f"{cost:g}" for cost in costs)
            raise UserError(f"costs {given}: give F,I,W from 0 up, not all of them 0")

    def of(self, kind: Kind) -> float:
        """Cost of a compute action."""
        return {
            F: self.forward,
            B: self.input_gradient + self.weight_gradient,
            I: self.input_gradient,
            W: self.weight_gradient,
        }[kind]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule laid out in time.

    ``spans[rank]`` are its compute actions with start and end. ``bubble`` is the idle fraction of
    all ranks from 0 to ``makespan``, ``bubbles[rank]`` that of one. ``peak_in_flight[rank]`` is
    the most stage-micro-batches it holds activations of at once: from F to the end of their
    backward, of W where that is apart.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble: float
    bubbles: tuple[float, ...]
    peak_in_flight: tuple[int, ...]


def simulate(grid: Grid, placement: Sequence[int], costs: Costs, link: float = 0.0) -> Simulation:
    """Run a grid, lowered or not, with every action as early as its rank and its input allow.

    What comes from another rank comes ``link`` after it was made and keeps nobody busy. Raises
    ``ValueError`` for a grid that does not run to its end: ``lowering.validate`` says why.
    """
    if not (math.isfinite(link) and link >= 0):
        raise ValueError(f"a link takes a time from 0 up, not {link}")
    compute = tuple(tuple(a for a in actions if a.kind.is_compute) for actions in grid)
    spans = _run(compute, placement, costs, link)
    makespan = max((actions[-1][2] for actions in spans if actions), default=0.0)
    busy = [math.fsum(end - start for _, start, end in actions) for actions in spans]
    return Simulation(
        spans,
        makespan,
        bubble=_idle(math.fsum(busy), len(grid) * makespan),
        bubbles=tuple(_idle(time, makespan) for time in busy),
        peak_in_flight=_peaks(compute),
    )


def _idle(busy: float, available: float) -> float:
    return max(0.0, 1 - busy / available) if available else 0.0


def _run(
    grid: Grid, placement: Sequence[int], costs: Costs, link: float
) -> tuple[tuple[Span, ...], ...]:
    shares = Counter(placement)
    durations = [
        {kind: costs.of(kind) / max(1, shares[rank]) for kind in (F, B, I, W)}
        for rank in range(len(grid))
    ]
    outputs: list[dict[int, float]] = [{} for _ in placement]  # when a micro-batch left a stage
    gradients: list[dict[int, float]] = [{} for _ in placement]  # when its gradient did
    spans: list[list[Span]] = [[] for _ in grid]
    clock = [0.0] * len(grid)
    waiting: dict[tuple[int, bool, int], int] = {}  # (stage, backward, micro-batch) -> rank
    ready = deque(range(len(grid)))
    while ready:
        rank = ready.popleft()
        actions = grid[rank]
        for index in range(len(spans[rank]), len(actions)):
            action = actions[index]
            stage, kind, microbatch = action.stage, action.kind, action.microbatch
            source = stage - 1 if kind is F else stage + 1
            start = clock[rank]
            if 0 <= source < len(placement):
                made = (outputs if kind is F else gradients)[source].get(microbatch)
                if made is None:
                    waiting[source, kind is not F, microbatch] = rank
                    break
                start = max(start, made if placement[source] == rank else made + link)
            end = clock[rank] = start + durations[rank][kind]
            spans[rank].append((action, start, end))
            if kind is not W:
                (outputs if kind is F else gradients)[stage][microbatch] = end
                waiter = waiting.pop((stage, kind is not F, microbatch), None)
                if waiter is not None:
                    ready.append(waiter)
    for rank, done in enumerate(spans):
        if len(done) < len(grid[rank]):
            raise ValueError(
                f"the schedule stops: rank {rank} waits for ever in {grid[rank][len(done)]}"
            )
    return tuple(map(tuple, spans))


def _peaks(grid: Grid) -> tuple[int, ...]:
    """Most stage-micro-batches in flight on each rank; its own order alone decides."""
    peaks = []
    for actions in grid:
        ends: dict[tuple[int, int], int] = {}  # index of the last backward action
        for index, action in enumerate(actions):
            if action.kind is not F:
                ends[action.stage, action.microbatch] = index
        held = peak = 0
        for index, action in enumerate(actions):
            key = (action.stage, action.microbatch)
            if action.kind is F:
                held += key in ends  # without backward nothing is held
                peak = max(peak, held)
            elif ends[key] == index:
                held -= 1
        peaks.append(peak)
    return tuple(peaks)
