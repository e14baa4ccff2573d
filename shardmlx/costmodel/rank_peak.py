"""Predict the peak of a rank that runs its actions over and over. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardmlx.costmodel.memory import StageMemory, held_once
from shardmlx.costmodel.training_setup import TrainingSetup
from shardmlx.engine.buffers import PREPOSTED, SUM_BUFFER_BYTES
from shardmlx.pipeline.actions import Action, Kind

_NUMBERS = (
    *("after_forward", "after_input", "during_forward", "during_input", "during_weight"),
    "gradients",
)
"""Names of the bytes of a stage that come and go with its actions."""


class PeakOfActions:
    """The peak of a rank that runs lowered ``actions`` over and over, for any stages' memory."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._multiples: dict[tuple[Any, ...], np.ndarray] = {}

    def of(self, stages: Mapping[int, StageMemory], setup: TrainingSetup) -> int:
        """Return the peak bytes of ``stages``, by index, in a step and its update."""
        own = tuple(stages.values())
        resident = sum(stage.resident for stage in own) - held_once(own)
        if setup.dp > 1 or (any(stage.tied for stage in own) and setup.tune.unfreeze_all):
            resident += SUM_BUFFER_BYTES
        needs = tuple((i, each.has_input_gradient, each.is_trained) for i, each in stages.items())
        key = needs, setup.joins_weights
        if key not in self._multiples:
            self._multiples[key] = self._count(stages, setup.joins_weights)
        numbers = [getattr(stage, name) for stage in own for name in _NUMBERS]
        numbers.append(setup.message)
        most = int((self._multiples[key] @ np.array(numbers, np.int64)).max(initial=0))
        gradients = sum(stage.gradients for stage in own)
        updating = max((stage.during_update for stage in own), default=0)
        return resident + max(most, gradients + updating)

    def _count(self, stages: Mapping[int, StageMemory], sums_at_input: bool) -> np.ndarray:
        """Return how many of each number, and of messages, are in memory at each action."""
        names = [(index, name) for index in stages for name in _NUMBERS]
        *units, message = np.eye(len(names) + 1, dtype=np.int64)
        unit = dict(zip(names, units, strict=True))
        nothing = np.zeros_like(message)
        to_receive = sum(action.kind is Kind.RECV_F for action in self._actions)
        held: dict[tuple[int, int], np.ndarray] = {}
        total, sent = nothing, False
        sums: dict[int, np.ndarray] = {}
        found = [nothing]
        for action in self._actions:
            index, key = action.stage, (action.stage, action.microbatch)
            stage = stages[index]
            if action.kind in (Kind.I, Kind.SEND_B) and not stage.has_input_gradient:
                continue
            if action.kind is Kind.W and not stage.is_trained:
                continue
            before = left = held.get(key, nothing)
            total, passing, summed = total - before, nothing, sum(sums.values(), nothing)
            match action.kind:
                case Kind.F:
                    before = left = unit[index, "after_forward"]
                    passing = unit[index, "during_forward"]
                case Kind.I:
                    # If no W follows, nothing is held for it.
                    left = unit[index, "after_input"] if stage.is_trained else nothing
                    passing = unit[index, "during_input"]
                case Kind.W:
                    passing, left = unit[index, "during_weight"], nothing
                case Kind.RECV_F:
                    to_receive -= 1
                case Kind.SEND_F | Kind.SEND_B:
                    sent = True
            if action.kind is Kind.W or (action.kind is Kind.I and sums_at_input):
                sums[index] = unit[index, "gradients"]
            buffers = (min(PREPOSTED, to_receive) + sent) * message
            others = total + passing + buffers
            found += [others + summed + before, others + sum(sums.values(), nothing) + left]
            total = total + left
            held[key] = left
        return np.unique(found, axis=0)
