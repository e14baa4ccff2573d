"""Predict the peak of a rank that runs its actions over and over. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardmlx.engine.buffers import PREPOSTED, SUM_BUFFER_BYTES
from shardmlx.pipeline.actions import Action, Kind
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.memory.generation import GenerationSetup, beside_weights
from shardmlx.planning.memory.stages import StageMemory, held_once, stage_memory
from shardmlx.planning.memory.training_setup import TrainingSetup

_NUMBERS = (
    *("after_forward", "after_input", "during_forward", "during_input", "during_weight"),
    "gradients",
)
"""Names of the bytes of a stage that come and go with its actions."""

_DURING = {Kind.F: "during_forward", Kind.I: "during_input", Kind.W: "during_weight"}
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
        self._stages = [
            PeakOfActions([action for action in plan.actions[rank] if action.stage == stage])
            for stage, rank in enumerate(plan.stage_map.placement)
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
    return tuple(map(PeakOfActions, plan.actions))


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


class Alike(NamedTuple):
    """A stage that is like the first one with its ``number``, with so many ``more`` bytes."""

    number: int
    more: float


class MemoryOfLayers:
    """The memory of stages of any layers of a model.

    Stages with as many layers of each kind that have a backward pass are alike, but for the bytes
    of their weights, and are counted once.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._upto = list(accumulate(setup.workload.weight_sizes.layers, initial=0.0))
        pattern = setup.shape.pattern
        self._below = [  # number of layers of each kind below a layer
            list(accumulate((each == kind for each in pattern), initial=0))
            for kind in range(len(setup.shape.kinds))
        ]
        self._known: dict[tuple[int, int], Alike] = {}
        self._numbers: dict[tuple[Hashable, ...], int] = {}
        self._first: list[tuple[StageMemory, float]] = []

    def alike(self, start: int, stop: int) -> Alike:
        """Return what a stage of layers ``start`` to ``stop`` is like."""
        known = self._known.get((start, stop))
        if known is None:
            known = self._known[start, stop] = self._find(start, stop)
        return known

    def memory(self, number: int) -> StageMemory:
        """Return the memory of the first stage with this ``number``."""
        return self._first[number][0]

    def _find(self, start: int, stop: int) -> Alike:
        nbytes = self._upto[stop] - self._upto[start]
        number = self._numbers.setdefault(self._counted(start, stop), len(self._first))
        if number == len(self._first):
            self._first.append((stage_memory(self._setup, start, stop), nbytes))
        return Alike(number, nbytes - self._first[number][1])

    def _counted(self, start: int, stop: int) -> tuple[Hashable, ...]:
        """Return all that counts of the layers of a stage, beside the bytes of their weights."""
        work = self._setup.workload
        lowest = min(max(start, work.first_trained), stop)
        below = self._kinds(start, lowest)
        if self._setup.divides_weights:
            below = (*below, self._upto[stop] - self._upto[start])
        elif lowest < stop:
            below = ()  # hidden states pass the larger layers above, too
        return (
            below,
            self._kinds(lowest, stop),
            self._kinds(min(max(start, work.first_trained_layer), stop), stop),
            (start == 0, stop == self._setup.shape.num_layers, start > work.first_trained),
        )

    def _kinds(self, start: int, stop: int) -> tuple[float, ...]:
        return tuple(each[stop] - each[start] for each in self._below)


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
        # Every stage has all kinds of actions here; its layers decide which of them it needs.
        self._stages = peaks_of_stages(draft.shortest_alike)
        self._peaks: dict[int, list[int]] = {}

    def __call__(self, stage: int, start: int, stop: int) -> float:
        """Return the peak bytes of layers ``start`` to ``stop`` as this stage."""
        number, more = self._layers.alike(start, stop)
        peaks = self._peaks.get(number)
        if peaks is None:
            memory = self._layers.memory(number)
            peaks = self._peaks[number] = self._stages.of(memory, self._setup)
        peak = peaks[stage] + more
        return peak if self._beside is None else peak + beside_weights(self._beside, start, stop)


def multiples(actions: Sequence[Action], needs: Needs, sums_at_input: bool) -> NDArray[np.int64]:
    """Return how many of each number, and of messages, are in memory: a row for each action when it
    begins, with what passes in it, and one for when it ends."""
    own = {stage: (has_input, is_trained) for stage, has_input, is_trained in needs}
    actions = [action for action in actions if _is_needed(action, *own[action.stage])]
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
    for row, (stage, kind, microbatch) in enumerate(actions):
        key = (stage, microbatch)
        left = None
        if kind not in _DURING:
            continue
        passing[row, column[stage, _DURING[kind]]] = 1
        if kind is Kind.F:
            is_forward[row] = True
            left = column[stage, "after_forward"]
        elif kind is Kind.I and own[stage][1]:  # if no W follows, nothing is held for it
            left = column[stage, "after_input"]
        if key in held:
            change[row, held.pop(key)] -= 1
        if left is not None:
            change[row, left] += 1
            held[key] = left
        if kind is Kind.W or (kind is Kind.I and sums_at_input):
            summed[row:, column[stage, "gradients"]] = 1
    passing[:, -1] = _message_buffers(actions)
    after = change.cumsum(axis=0)
    before = np.where(is_forward, after, after - change)
    nothing = np.zeros((1, shape[1]), np.int64)
    summed_before = np.vstack([nothing, summed])[:-1]
    rows = (nothing, before + summed_before + passing, after + summed + passing)
    return np.unique(np.vstack(rows), axis=0)


def _is_needed(action: Action, has_input_gradient: bool, is_trained: bool) -> bool:
    """Return whether a stage takes an action that one with all gradients takes."""
    if action.kind in (Kind.I, Kind.SEND_B):
        return has_input_gradient
    return is_trained or action.kind is not Kind.W


def _message_buffers(actions: Sequence[Action]) -> NDArray[np.int64]:
    """Return the messages in memory in each action: those to be received, and one that was sent."""
    receives = np.array([action.kind is Kind.RECV_F for action in actions], np.int64)
    sends = np.array([action.kind in (Kind.SEND_F, Kind.SEND_B) for action in actions], np.int64)
    to_receive = receives.sum() - receives.cumsum()
    buffers: NDArray[np.int64] = np.minimum(PREPOSTED, to_receive) + np.minimum(1, sends.cumsum())
    return buffers
