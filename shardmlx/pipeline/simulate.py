"""Simulate a schedule: when each action runs, bubble, links, activations. No MLX, no MPI.

A rank runs its actions in order, each as soon as its input is there; sending takes no time of a
rank, as in the engine. A link from one rank to another carries one message at a time and others
queue; the links of a rank to different peers, and the two directions between two ranks, are
independent.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from shardmlx.errors import UserError
from shardmlx.pipeline.actions import COMPUTE, Action, Grid, Kind
from shardmlx.pipeline.schedules import compute_actions, get_schedule

F, B, I, W = COMPUTE

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
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]

    @property
    def written_spans(self) -> tuple[tuple[tuple[str, float, float], ...], ...]:
        """The spans of each rank with their actions as text: ``("0F3", 1.0, 2.0)``."""
        return tuple(
            tuple((str(action), start, end) for action, start, end in of_rank)
            for of_rank in self.spans
        )

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most stage-micro-batches of each rank with activations at once: from F to the end of
        the backward, or of a separate W."""
        return tuple(_most_in_flight([action for action, _, _ in spans]) for spans in self.spans)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The bubble of each rank, as a fraction of ``makespan``."""
        if not self.makespan:
            return (0.0,) * len(self.spans)
        return tuple(
            max(0.0, 1 - (busy + exposed) / self.makespan)
            for busy, exposed in zip(self.busy, self.exposed, strict=True)
        )

    @property
    def bubble(self) -> float:
        """The mean bubble of all ranks."""
        return math.fsum(self.bubbles) / len(self.bubbles)


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
    compute = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in grid)
    of_stage = _costs_of_stages(costs, placement)
    occupied, delayed = (_between(times, len(grid)) for times in (link, latency))
    spans, exposed = _run(compute, placement, of_stage, occupied, delayed)
    makespan = max((actions[-1][2] for actions in spans if actions), default=0.0)
    busy = tuple(math.fsum(end - start for _, start, end in actions) for actions in spans)
    return Simulation(spans, makespan, busy, exposed)


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


def _costs_of_stages(costs: Costs | Sequence[Costs], placement: Sequence[int]) -> list[Costs]:
    if not isinstance(costs, Costs):
        if len(costs) != len(placement):
            raise ValueError(f"costs of {len(costs)} stages, the placement has {len(placement)}")
        return list(costs)
    stages_of = Counter(placement)
    return [Costs(*(cost / stages_of[rank] for cost in astuple(costs))) for rank in placement]


def _between(times: Seconds, ranks: int) -> Sequence[Sequence[float]]:
    table = times if isinstance(times, Sequence) else [[times] * ranks] * ranks
    if len(table) != ranks or any(len(row) != ranks for row in table):
        raise ValueError(f"give the times of links between {ranks} ranks as {ranks} x {ranks}")
    for time in (time for row in table for time in row):
        if not (math.isfinite(time) and time >= 0):
            raise ValueError(f"a link takes a time from 0 up, not {time}")
    return table


def _run(
    grid: Grid,
    placement: Sequence[int],
    costs: Sequence[Costs],
    occupied: Sequence[Sequence[float]],
    delayed: Sequence[Sequence[float]],
) -> tuple[tuple[tuple[Span, ...], ...], tuple[float, ...]]:
    """Return spans and exposed waits of each rank."""
    durations = [{kind: cost.of(kind) for kind in COMPUTE} for cost in costs]
    spans: list[list[Span]] = [[] for _ in grid]
    exposed, clocks = [0.0] * len(grid), [0.0] * len(grid)
    link_free: dict[tuple[int, int], float] = defaultdict(float)  # when the last message has left
    # Inputs by stage, direction and micro-batch: when each was made, and when it arrived.
    inputs: dict[tuple[int, bool, int], tuple[float, float]] = {}
    waiting: dict[tuple[int, bool, int], int] = {}
    last = len(placement) - 1
    ready = deque(range(len(grid)))
    while ready:
        rank = ready.popleft()
        clock, done = clocks[rank], spans[rank]
        for index in range(len(done), len(grid[rank])):  # a slice would be copied at each wait
            stage, kind, microbatch = action = grid[rank][index]
            start, is_forward = clock, kind is F
            if stage != (0 if is_forward else last):
                needed = (stage, is_forward, microbatch)
                if needed not in inputs:
                    waiting[needed] = rank
                    break
                made, arrived = inputs[needed]
                if arrived > start:
                    exposed[rank] += arrived - max(start, made)
                    start = arrived
            clock = start + durations[stage][kind]
            done.append((action, start, clock))
            target = stage + 1 if is_forward else stage - 1
            if kind is W or not 0 <= target <= last:
                continue
            arrived, peer = clock, placement[target]
            if peer != rank:
                left = max(clock, link_free[rank, peer]) + occupied[rank][peer]
                link_free[rank, peer] = left
                arrived = left + delayed[rank][peer]
            output = (target, is_forward, microbatch)
            inputs[output] = (clock, arrived)
            if output in waiting:
                ready.append(waiting.pop(output))
        clocks[rank] = clock
    for rank, done in enumerate(spans):
        if len(done) < len(grid[rank]):
            raise ValueError(
                f"the schedule stops: rank {rank} waits for ever in {grid[rank][len(done)]}"
            )
    return tuple(map(tuple, spans)), tuple(exposed)


def _most_in_flight(actions: Sequence[Action]) -> int:
    """Count the most stage-micro-batches in flight on a rank, which depends on its own order."""
    ends: dict[tuple[int, int], int] = {}  # index of the last backward action
    for index, action in enumerate(actions):
        if action.kind is not F:
            ends[action.stage, action.microbatch] = index
    held = most = 0
    for index, action in enumerate(actions):
        key = (action.stage, action.microbatch)
        if action.kind is F:
            held += key in ends  # without backward nothing is held
            most = max(most, held)
        elif ends[key] == index:
            held -= 1
    return most
