"""Predict the peak of a rank that runs its actions over and over. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

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
        resident = sum(stage.resident for stage in own) - held_once(own)
        if setup.dp > 1 or (any(stage.tied for stage in own) and setup.tune.unfreeze_all):
            resident += SUM_BUFFER_BYTES
        needs = tuple((i, each.has_input_gradient, each.is_trained) for i, each in stages.items())
        key = needs, setup.joins_weights
        if key not in self._multiples:
            self._multiples[key] = multiples(self._actions, needs, setup.joins_weights)
        numbers = [getattr(stage, name) for stage in own for name in _NUMBERS]
        numbers.append(setup.message)
        most = int((self._multiples[key] @ np.array(numbers, np.int64)).max(initial=0))
        gradients = sum(stage.gradients for stage in own)
        updating = max((stage.during_update for stage in own), default=0)
        return resident + max(most, gradients + updating)


@lru_cache(maxsize=256)
def peaks_of_ranks(plan: Plan) -> tuple[PeakOfActions, ...]:
    """Return the peak of each pipeline rank."""
    return tuple(map(PeakOfActions, plan.actions))


@lru_cache(maxsize=256)
def peaks_of_stages(plan: Plan) -> tuple[PeakOfActions, ...]:
    """Return the peak of each stage, were it alone on its rank."""
    return tuple(
        PeakOfActions([action for action in plan.actions[rank] if action.stage == stage])
        for stage, rank in enumerate(plan.stage_map.placement)
    )


class PeaksOfLayers:
    """The peak bytes of a stage alone on its rank, by (stage, start, stop): layers start to stop;
    with what it generates ``beside``, if it does.

    A partitioner asks for many. Stages of as many layers of each kind, frozen and trained, take as
    much, and are counted once.
    """

    def __init__(
        self, draft: Plan, setup: TrainingSetup, beside: GenerationSetup | None = None
    ) -> None:
        self._setup = setup
        self._beside = beside
        # Every stage has all kinds of actions here; its layers decide which of them it needs.
        self._of_stage = peaks_of_stages(draft.shortest_alike)
        self._upto = list(accumulate(setup.workload.weight_sizes.layers, initial=0.0))
        pattern = setup.shape.pattern
        self._below = [  # number of layers of each kind below a layer
            list(accumulate((each == kind for each in pattern), initial=0))
            for kind in range(len(setup.shape.kinds))
        ]
        self._alike: dict[tuple[int, int], int] = {}
        self._numbers: dict[tuple[Hashable, ...], int] = {}
        self._memory: list[StageMemory] = []
        self._peaks: dict[tuple[int, int], int] = {}

    def __call__(self, stage: int, start: int, stop: int) -> float:
        """Return the peak bytes of layers ``start`` to ``stop`` as this stage."""
        number = self._alike.get((start, stop))
        if number is None:
            number = self._alike[start, stop] = self._number(start, stop)
        if (stage, number) not in self._peaks:
            memory = {stage: self._memory[number]}
            self._peaks[stage, number] = self._of_stage[stage].of(memory, self._setup)
        peak = self._peaks[stage, number]
        return peak if self._beside is None else peak + beside_weights(self._beside, start, stop)

    def _number(self, start: int, stop: int) -> int:
        """Return the number of all ranges of layers that take as much memory as this one."""
        first = self._setup.workload.first_trained_layer
        lowest = min(max(start, first), stop)
        frozen = tuple(each[lowest] - each[start] for each in self._below)
        trained = tuple(each[stop] - each[lowest] for each in self._below)
        nbytes = self._upto[stop] - self._upto[start]
        ends = (start == 0, stop == self._setup.shape.num_layers, start > first)
        number = self._numbers.setdefault((frozen, trained, nbytes, *ends), len(self._memory))
        if number == len(self._memory):
            self._memory.append(stage_memory(self._setup, start, stop))
        return number


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
