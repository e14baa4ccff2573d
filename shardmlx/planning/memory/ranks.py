"""Predict the peak of a rank that runs its actions over and over. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardmlx.engine.buffers import PREPOSTED, SUM_BUFFER_BYTES
from shardmlx.partitioners.problem import Array
from shardmlx.pipeline.actions import Action, Kind
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.memory.generation import GenerationSetup, beside_weights
from shardmlx.planning.memory.stages import StageMemory, held_once, stage_memory
from shardmlx.planning.memory.training_setup import TrainingSetup

F, I, W = Kind.F, Kind.I, Kind.W
SEND_F, RECV_F, SEND_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B

_NUMBERS = (
    *("after_forward", "after_input", "during_forward", "during_input", "during_weight"),
    "gradients",
)
"""Names of the bytes of a stage that come and go with its actions."""

_DURING = {F: "during_forward", I: "during_input", W: "during_weight"}
"""The bytes that pass in an action."""

Needs = tuple[tuple[int, bool, bool], ...]
"""Stages, and whether each has a gradient for its input, and is trained."""


class PeakOfActions:
    """The peak of a rank that runs lowered ``actions`` over and over, for any stages' memory."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._multiples: dict[tuple[Needs, bool], NDArray[np.int64]] = {}

    def of(self, stages: Mapping[int, StageMemory], setup: TrainingSetup) -> int:
        """Return the peak bytes of ``stages``, by index, in a step and its update."""
        own = tuple(stages.values())
        multiples = self.multiples(_needs(stages), setup.joins_weights)
        most = int((multiples @ _numbers(own, setup)).max(initial=0))
        gradients = sum(stage.gradients for stage in own)
        updating = max((stage.during_update for stage in own), default=0)
        return _resident(own, setup) + max(most, gradients + updating)

    def multiples(self, needs: Needs, sums_at_input: bool) -> NDArray[np.int64]:
        """Return the ``multiples`` of the actions, which are counted once."""
        key = needs, sums_at_input
        if key not in self._multiples:
            self._multiples[key] = multiples(self._actions, *key)
        return self._multiples[key]


class PeaksOfStages:
    """The peaks of the stages of a plan, were each alone on its rank, for any stage's memory."""

    def __init__(self, plan: Plan) -> None:
        ranks = peaks_of_ranks(plan)
        actions = plan.unproved_actions
        placement = plan.stage_map.placement
        self._stages = [
            ranks[rank]
            if placement.count(rank) == 1
            else PeakOfActions([action for action in actions[rank] if action.stage == stage])
            for stage, rank in enumerate(placement)
        ]
        self._stacked: dict[tuple[bool, ...], tuple[NDArray[np.int64], list[int]]] = {}

    def of(self, memory: StageMemory, setup: TrainingSetup) -> list[int]:
        """Return the peak bytes that each stage would have with this ``memory``, in a step and its
        update."""
        multiples, first_rows = self._multiples(memory, setup.joins_weights)
        most = np.maximum.reduceat(multiples @ _numbers([memory], setup), first_rows)
        resident = _resident([memory], setup)
        updating = memory.gradients + memory.during_update
        return [resident + max(each, updating) for each in most.tolist()]

    def _multiples(
        self, memory: StageMemory, sums_at_input: bool
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Return the multiples of all stages, one below the other, and the first row of each."""
        key = (memory.has_input_gradient, memory.is_trained, sums_at_input)
        if key not in self._stacked:
            tables = [
                each.multiples(_needs({stage: memory}), sums_at_input)
                for stage, each in enumerate(self._stages)
            ]
            first_rows = [0, *accumulate(map(len, tables[:-1]))]
            self._stacked[key] = np.vstack(tables), first_rows
        return self._stacked[key]


@lru_cache(maxsize=256)
def peaks_of_ranks(plan: Plan) -> tuple[PeakOfActions, ...]:
    """Return the peak of each pipeline rank."""
    return tuple(map(PeakOfActions, plan.unproved_actions))


@lru_cache(maxsize=256)
def peaks_of_stages(plan: Plan) -> PeaksOfStages:
    """Return the peaks of the stages of a plan, which are counted once."""
    return PeaksOfStages(plan)


def _needs(stages: Mapping[int, StageMemory]) -> Needs:
    return tuple((i, each.has_input_gradient, each.is_trained) for i, each in stages.items())


def _numbers(stages: Sequence[StageMemory], setup: TrainingSetup) -> NDArray[np.int64]:
    """Return the bytes of which ``multiples`` says how often they are in memory."""
    numbers = [getattr(stage, name) for stage in stages for name in _NUMBERS]
    return np.array([*numbers, setup.message], np.int64)


def _resident(stages: Sequence[StageMemory], setup: TrainingSetup) -> int:
    """Return the bytes that a rank with these stages has in memory all the time."""
    resident = sum(stage.resident for stage in stages) - held_once(stages)
    if setup.dp > 1 or (any(stage.tied for stage in stages) and setup.tune.unfreeze_all):
        resident += SUM_BUFFER_BYTES
    return resident


class StagesAlike(NamedTuple):
    """The stages of a model by [start, stop]: those with equal ``numbers`` are like the one of the
    ``first`` layers with that number, with so many ``more`` bytes."""

    numbers: NDArray[np.intp]
    more: Array
    first: list[tuple[int, int]]


@lru_cache(maxsize=64)
def _stages_alike(
    pattern: tuple[int, ...],
    sizes: tuple[float, ...],
    first_trained: tuple[int, int],
    divides_weights: bool,
) -> StagesAlike:
    """Return which stages are alike: those with as many layers of each kind that have a backward
    pass, and that are trained from the ``first_trained`` of both on, but for the bytes of their
    weights, unless these are divided."""
    layers = len(pattern)
    start, stop = np.triu_indices(layers + 1, 1)
    upto = np.array(list(accumulate(sizes, initial=0.0)))
    nbytes = upto[stop] - upto[start]
    first, first_layer = first_trained
    lowest = np.clip(first, start, stop)
    lowest_layer = np.clip(first_layer, start, stop)
    # Hidden states pass the larger layers above, too: those below do not count then.
    counts_below = divides_weights | (lowest == stop)
    counted = [start == 0, stop == layers, start > first, counts_below, nbytes * divides_weights]
    for kind in set(pattern):
        below = np.array(list(accumulate((each == kind for each in pattern), initial=0)))
        counted.append((below[lowest] - below[start]) * counts_below)
        counted.append(below[stop] - below[lowest])
        counted.append(below[stop] - below[lowest_layer])
    table = np.array(counted, np.float64).T
    _, places, number = np.unique(table, axis=0, return_index=True, return_inverse=True)
    number = number.reshape(-1)
    numbers = np.zeros((layers + 1,) * 2, np.intp)
    numbers[start, stop] = number
    more = np.zeros((layers + 1,) * 2)
    more[start, stop] = nbytes - nbytes[places][number]
    return StagesAlike(numbers, more, [(int(start[i]), int(stop[i])) for i in places])


class MemoryOfLayers:
    """The memory of stages of any layers of a model; those ``alike`` are counted once."""

    def __init__(self, setup: TrainingSetup) -> None:
        work = setup.workload
        self._setup = setup
        self._known: dict[int, StageMemory] = {}
        self.alike = _stages_alike(
            setup.shape.pattern,
            work.weight_sizes.layers,
            (work.first_trained, work.first_trained_layer),
            setup.divides_weights,
        )

    def of(self, number: int) -> StageMemory:
        """Return the memory of the first stage with this number."""
        if number not in self._known:
            self._known[number] = stage_memory(self._setup, *self.alike.first[number])
        return self._known[number]


@lru_cache(maxsize=256)
def memory_of_layers(setup: TrainingSetup) -> MemoryOfLayers:
    """Return the memory of stages of any layers, for all plans with this setup."""
    return MemoryOfLayers(setup)


class PeaksOfLayers:
    """The peak bytes of a stage alone on its rank, by (stage, start, stop): layers start to stop;
    with what it generates ``beside``, if it does. A partitioner asks for many."""

    def __init__(
        self, draft: Plan, setup: TrainingSetup, beside: GenerationSetup | None = None
    ) -> None:
        self._setup = setup
        self._beside = beside
        self._layers = memory_of_layers(setup)
        self._alike = self._layers.alike
        # Every stage has all kinds of actions here; its layers decide which of them it needs.
        self._stages = peaks_of_stages(draft.shortest_alike)
        self._known = np.zeros(len(self._alike.first), bool)
        self._peaks = np.zeros((draft.stage_map.num_stages, len(self._known)))

    def __call__(self, stage: int, start: int, stop: int) -> float:
        """Return the peak bytes of layers ``start`` to ``stop`` as this stage."""
        number = self._alike.numbers.item(start, stop)
        if not self._known[number]:
            self._count(number)
        peak: float = self._peaks.item(stage, number) + self._alike.more.item(start, stop)
        return peak if self._beside is None else peak + beside_weights(self._beside, start, stop)

    def table(self, stage: int, starts: range, stops: range) -> Array:
        """Return the peak bytes of a stage by [start, stop]: any where it has no layer."""
        part = np.ix_(starts, stops)
        numbers = self._alike.numbers[part]
        for number in np.unique(numbers[~self._known[numbers]]).tolist():
            self._count(number)
        peaks: Array = self._peaks[stage][numbers] + self._alike.more[part]
        if self._beside is None:
            return peaks
        beside = partial(beside_weights, self._beside)
        return peaks + [[beside(start, max(start, stop)) for stop in stops] for start in starts]

    def _count(self, number: int) -> None:
        memory = self._layers.of(number)
        self._peaks[:, number] = self._stages.of(memory, self._setup)
        self._known[number] = True


def multiples(actions: Sequence[Action], needs: Needs, sums_at_input: bool) -> NDArray[np.int64]:
    """Return how many of each number, and of messages, are in memory: a row for each action when it
    begins, with what passes in it, and one for when it ends."""
    own = {stage: (has_input, is_trained) for stage, has_input, is_trained in needs}
    left_out = {stage: _left_out(*of_stage) for stage, of_stage in own.items()}
    actions = [action for action in actions if action.kind not in left_out[action.stage]]
    column = {
        (stage, name): len(_NUMBERS) * place + i
        for place, stage in enumerate(own)
        for i, name in enumerate(_NUMBERS)
    }
    shape = (len(actions), len(column) + 1)
    # Held arrays that an action adds, or takes away; others that are there while it runs.
    change, passing, summed = (np.zeros(shape, np.int64) for _ in range(3))
    is_forward = np.zeros((len(actions), 1), bool)
    held: dict[tuple[int, int], int] = {}  # the column of what a micro-batch holds in a stage
    first_sums: dict[int, int] = {}  # the row in which a stage has gradients from on
    for row, (stage, kind, microbatch) in enumerate(actions):
        key = (stage, microbatch)
        left = None
        if kind not in _DURING:
            continue
        passing[row, column[stage, _DURING[kind]]] = 1
        if kind is F:
            is_forward[row] = True
            left = column[stage, "after_forward"]
        elif kind is I and own[stage][1]:  # if no W follows, nothing is held for it
            left = column[stage, "after_input"]
        if key in held:
            change[row, held.pop(key)] -= 1
        if left is not None:
            change[row, left] += 1
            held[key] = left
        if kind is W or (kind is I and sums_at_input):
            first_sums.setdefault(stage, row)
    for stage, row in first_sums.items():
        summed[row:, column[stage, "gradients"]] = 1
    passing[:, -1] = _message_buffers(actions)
    after = change.cumsum(axis=0)
    before = np.where(is_forward, after, after - change)
    nothing = np.zeros((1, shape[1]), np.int64)
    summed_before = np.vstack([nothing, summed])[:-1]
    rows = (nothing, before + summed_before + passing, after + summed + passing)
    return _unlike(np.vstack(rows))


def _unlike(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each row once: rows of small numbers, none of which is below 0, are compared as one
    number each."""
    digits = rows.max(axis=0) + 1
    if np.prod(digits, dtype=np.float64) >= 2**62:
        return np.unique(rows, axis=0)
    places = np.cumprod([1, *digits[:-1]])
    _, first = np.unique(rows @ places, return_index=True)
    return rows[first]


def _left_out(has_input_gradient: bool, is_trained: bool) -> tuple[Kind, ...]:
    """Return the kinds of actions that a stage with all gradients takes, and this one does not."""
    of_input = () if has_input_gradient else (Kind.I, Kind.SEND_B)
    return of_input if is_trained else (*of_input, Kind.W)


def _message_buffers(actions: Sequence[Action]) -> NDArray[np.int64]:
    """Return the messages in memory in each action: those to be received, and one that was sent."""
    kinds = [kind for _, kind, _ in actions]
    receives = np.array([kind is RECV_F for kind in kinds], np.int64)
    sends = np.array([kind is SEND_F or kind is SEND_B for kind in kinds], np.int64)
    to_receive = receives.sum() - receives.cumsum()
    buffers: NDArray[np.int64] = np.minimum(PREPOSTED, to_receive) + np.minimum(1, sends.cumsum())
    return buffers
