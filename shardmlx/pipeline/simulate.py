"""Simulate a schedule: when each action runs, bubble, links, activations. No MLX, no MPI.

A rank runs its actions in order, each as soon as its input is there; sending takes no time of a
rank, as in the engine. A link from one rank to another carries one message at a time and others
queue; the links of a rank to different peers, and the two directions between two ranks, are
independent.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmlx.errors import UserError
from shardmlx.pipeline.actions import Action, Grid, Kind, collector_paused
from shardmlx.pipeline.schedules import compute_actions, get_schedule

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W

Span = tuple[Action, float, float]
"""An action, its start and its end."""


Seconds = float | Sequence[Sequence[float]]
"""Time that is the same between all ranks, or ``[a][b]`` from rank a to rank b."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time for one micro-batch, in any unit. A whole backward B costs both gradients."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    def __post_init__(self) -> None:
        costs = (self.forward, self.input_gradient, self.weight_gradient)
        if not all(math.isfinite(cost) and cost >= 0 for cost in costs) or not any(costs):
            given = ",".join(f"{cost:g}" for cost in costs)
            raise UserError(f"costs {given}", "give F,I,W from 0 up, not all of them 0")

    def of(self, kind: Kind) -> float:
        """Return the cost of a compute action."""
        return {
            F: self.forward,
            B: self.input_gradient + self.weight_gradient,
            I: self.input_gradient,
            W: self.weight_gradient,
        }[kind]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule laid out in time, from 0 to ``makespan``.

    ``spans[rank]`` are its compute actions with start and end. The time of a rank has three parts,
    the same as in a training run's report: ``busy[rank]`` computing, ``exposed[rank]`` waiting for
    messages that were already made, and the bubble, waiting for others to compute.
    ``bubbles[rank]`` is the bubble as a fraction of ``makespan``, ``bubble`` the mean of all ranks.
    ``peak_in_flight[rank]`` is the most stage-micro-batches with activations at once: from F to the
    end of the backward, or of a separate W.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble: float
    bubbles: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    busy: tuple[float, ...]
    exposed: tuple[float, ...]


@collector_paused()
def simulate(
    grid: Grid,
    placement: Sequence[int],
    costs: Costs | Sequence[Costs],
    link: Seconds = 0.0,
    latency: Seconds = 0.0,
) -> Simulation:
    """Run a grid, lowered or not, with every action as early as its rank and its input allow.

    A single ``Costs`` is for all the stages of a rank together: with v stages the rank spends 1/v
    in each, so that schedules compare on the same model. A sequence gives the costs of each stage.
    A message occupies its link for ``link`` and arrives ``latency`` after it has left. All times
    have the same unit. Raises ``ValueError`` for a grid that does not run to its end:
    ``lowering.validate`` says why.
    """
    compute = tuple(tuple(a for a in actions if a.kind.is_compute) for actions in grid)
    of_stage = _costs_of_stages(costs, placement)
    occupied, delayed = (_between(times, len(grid)) for times in (link, latency))
    spans, exposed = _run(compute, _steps(placement, of_stage, occupied, delayed))
    makespan = max((actions[-1][2] for actions in spans if actions), default=0.0)
    busy = tuple(math.fsum(end - start for _, start, end in actions) for actions in spans)
    used = tuple(map(sum, zip(busy, exposed, strict=True)))
    return Simulation(
        spans,
        makespan,
        bubble=_idle(math.fsum(used), len(grid) * makespan),
        bubbles=tuple(_idle(time, makespan) for time in used),
        peak_in_flight=_peaks(compute),
        busy=busy,
        exposed=exposed,
    )


def simulate_schedule(
    schedule: str,
    pp: int,
    microbatches: int,
    *,
    virtual: int | None = None,
    costs: Costs | Sequence[Costs] = Costs(),
    link: Seconds = 0.0,
    latency: Seconds = 0.0,
) -> Simulation:
    """Simulate one step of a schedule, by its name, on ``pp`` ranks.

    ``virtual`` is the number of stages a rank, by default the schedule's own; ``costs``, ``link``
    and ``latency`` are as for ``simulate``. Raises ``UserError`` for numbers that the schedule
    cannot run.
    """
    chosen = get_schedule(schedule)
    virtual = chosen.default_virtual if virtual is None else virtual
    grid = compute_actions(schedule, pp, microbatches, virtual)
    return simulate(grid, chosen.placement(pp, virtual), costs, link, latency)


def _idle(used: float, available: float) -> float:
    return max(0.0, 1 - used / available) if available else 0.0


def _costs_of_stages(costs: Costs | Sequence[Costs], placement: Sequence[int]) -> list[Costs]:
    if not isinstance(costs, Costs):
        if len(costs) != len(placement):
            raise ValueError(f"costs of {len(costs)} stages, the placement has {len(placement)}")
        return list(costs)
    stages_of = Counter(placement)
    shares = {
        stages: Costs(
            costs.forward / stages, costs.input_gradient / stages, costs.weight_gradient / stages
        )
        for stages in set(stages_of.values())
    }
    return [shares[stages_of[rank]] for rank in placement]


def _between(times: Seconds, ranks: int) -> Sequence[Sequence[float]]:
    table = times if isinstance(times, Sequence) else [[times] * ranks] * ranks
    if len(table) != ranks or any(len(row) != ranks for row in table):
        raise ValueError(f"give the times of links between {ranks} ranks as {ranks} x {ranks}")
    for time in (time for row in table for time in row):
        if not (math.isfinite(time) and time >= 0):
            raise ValueError(f"a link takes a time from 0 up, not {time}")
    return table


@dataclass(slots=True)
class _Link:
    """A link from one rank to another; ``free`` is when the last message so far has left."""

    seconds: float
    latency: float
    free: float = 0.0

    def carry(self, made: float) -> float:
        """Return when a message arrives; call it in the order in which messages are made."""
        self.free = max(made, self.free) + self.seconds
        return self.free + self.latency


@dataclass(slots=True)
class _Channel:
    """The way from a stage to its neighbour: when each micro-batch was made, and when it came."""

    receiver: int  # a rank
    link: _Link | None
    came: dict[int, tuple[float, float]] = field(default_factory=dict)
    awaited: int = -1  # the micro-batch that the receiver waits for


_Step = tuple[float, _Channel | None, _Channel | None]
"""Time of an action, channel of its input, channel of its output."""


def _steps(
    placement: Sequence[int],
    costs: Sequence[Costs],
    occupied: Sequence[Sequence[float]],
    delayed: Sequence[Sequence[float]],
) -> list[dict[Kind, _Step]]:
    """Return, for each stage, time and channels of each kind of action."""
    links: dict[tuple[int, int], _Link] = {}

    def channel(source: int, target: int) -> _Channel | None:
        if not 0 <= target < len(placement) or not 0 <= source < len(placement):
            return None
        ends = a, b = placement[source], placement[target]
        if a == b:
            return _Channel(b, None)
        return _Channel(b, links.setdefault(ends, _Link(occupied[a][b], delayed[a][b])))

    stages = range(-1, len(placement))
    up = [channel(stage, stage + 1) for stage in stages]  # up[s] comes to stage s
    down = [channel(stage + 1, stage) for stage in stages]  # down[s] leaves stage s
    return [
        {
            F: (cost.of(F), up[stage], up[stage + 1]),
            B: (cost.of(B), down[stage + 1], down[stage]),
            I: (cost.of(I), down[stage + 1], down[stage]),
            W: (cost.of(W), down[stage + 1], None),
        }
        for stage, cost in enumerate(costs)
    ]


def _run(
    grid: Grid, steps: Sequence[dict[Kind, _Step]]
) -> tuple[tuple[tuple[Span, ...], ...], tuple[float, ...]]:
    spans: list[list[Span]] = [[] for _ in grid]
    exposed = [0.0] * len(grid)
    clocks = [0.0] * len(grid)
    ready = deque(range(len(grid)))
    while ready:
        rank = ready.popleft()
        actions, done, clock = grid[rank], spans[rank], clocks[rank]
        for index in range(len(done), len(actions)):
            action = actions[index]
            microbatch = action.microbatch
            duration, source, target = steps[action.stage][action.kind]
            start = clock
            if source is not None:
                came = source.came.get(microbatch)
                if came is None:
                    source.awaited = microbatch
                    break
                made, arrived = came
                if arrived > clock:
                    exposed[rank] += arrived - max(clock, made)
                    start = arrived
            clock = start + duration
            done.append((action, start, clock))
            if target is not None:
                link = target.link
                target.came[microbatch] = (clock, clock if link is None else link.carry(clock))
                if target.awaited == microbatch:
                    target.awaited = -1
                    ready.append(target.receiver)
        clocks[rank] = clock
    for rank, done in enumerate(spans):
        if len(done) < len(grid[rank]):
            raise ValueError(
                f"the schedule stops: rank {rank} waits for ever in {grid[rank][len(done)]}"
            )
    return tuple(map(tuple, spans)), tuple(exposed)


def _peaks(grid: Grid) -> tuple[int, ...]:
    """Count the most stage-micro-batches in flight on each rank, which depends on its own order."""
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
