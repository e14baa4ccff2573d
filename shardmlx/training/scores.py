"""Scores of a step: its losses, and how an objective of preferences judges answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.engine.batches import WANTED, MicroBatch
from shardmlx.engine.engine import Results
from shardmlx.engine.objectives import Objective

_SUMS = (
    *("chosen", "rejected", "chosen_reward", "rejected_reward"),
    *("chosen_logp", "rejected_logp", "right"),
)
"""Sums over answers: how many are wanted and how many not, and the pairs that are judged rightly,
ties by half. A reward is what training has made an answer likelier, times beta."""


_NOISE = MappingProxyType({"float32": 2e-5, "float16": 0.01, "bfloat16": 0.08})
"""Difference of a pair's rewards that rounding alone makes under the starting weights, by the dtype
of the model: for a beta of 1, over the root of the two log-probabilities. SmolLM2-135M on a CPU
shows a quarter of it in float32, half of it in bfloat16."""


def scores_of(
    results: Results,
    microbatches: Sequence[MicroBatch],
    objective: Objective | None,
    dtype: str,
) -> tuple[Mapping[int, float], list[float]]:
    """Return the losses by micro-batch of the engine's results, which a rank without the last stage
    lacks; and the summed loss, with ``_SUMS`` of preferences, for a model of this ``dtype``."""
    if objective is None:
        return results, [sum(results.values())]
    losses = {}
    sums = np.zeros(len(_SUMS))
    for j, logps in results.items():
        microbatch = microbatches[j]
        given = mx.array(logps)
        losses[j] = float(np.array(objective.losses(given, microbatch).sum()))
        rewards = objective.rewards(given, microbatch)
        wanted = microbatch.known_of(WANTED) > 0
        for i, values in enumerate((np.ones(len(wanted)), rewards, logps)):
            sums[2 * i : 2 * i + 2] += values[wanted].sum(), values[~wanted].sum()
        if objective.facts.is_paired:
            margins = rewards[0::2] - rewards[1::2]
            is_tie = np.abs(margins) <= _rounding(logps, objective, dtype)
            sums[-1] += (~is_tie & (margins > 0)).sum() + is_tie.sum() / 2
    return losses, [sum(losses.values()), *sums.tolist()]


def _rounding(logps: np.ndarray, objective: Objective, dtype: str) -> np.ndarray:
    """Return the margin of each pair, (n / 2,), that rounding alone may make: none where rewards do
    not compare with the starting weights."""
    if not objective.rewards_gains:
        return np.zeros(len(logps) // 2)
    sizes = np.abs(logps[0::2]) + np.abs(logps[1::2])
    margins: np.ndarray = objective.how.strength * _NOISE[dtype] * np.sqrt(sizes)
    return margins


def means_of(totals: Iterable[Sequence[float]], objective: Objective | None) -> dict[str, float]:
    """Return the ``MEANS`` of answers, those of which there are any, from what ``scores_of`` sums
    on each rank; nothing without preferences."""
    if objective is None:
        return {}
    sums = np.sum([total[1:] for total in totals], axis=0)
    named: dict[str, Any] = dict(zip(_SUMS, sums.tolist(), strict=True))
    means = {
        f"{side}_{what}": named[f"{side}_{what}"] / named[side]
        for what in ("reward", "logp")
        for side in ("chosen", "rejected")
        if named[side]
    }
    if objective.facts.is_paired:
        pairs = max(1.0, named["chosen"])
        means["margin"] = (named["chosen_reward"] - named["rejected_reward"]) / pairs
        means["accuracy"] = named["right"] / pairs
    return means


def in_words(means: Mapping[str, float]) -> str:
    """Return the means as a log line shows them: ``, rewards 0.31 and -0.12, 75% right``."""
    rewards = [means.get(f"{side}_reward") for side in ("chosen", "rejected")]
    shown = " and ".join("none" if each is None else f"{each:.3f}" for each in rewards)
    accuracy = means.get("accuracy")
    right = "" if accuracy is None else f", {100 * accuracy:.0f}% right"
    return f", rewards {shown}{right}" if means else ""
