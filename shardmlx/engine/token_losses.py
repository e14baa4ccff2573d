"""Losses of tokens: plain functions of the log-probability of each target. No MLX, no MPI.

Names, formulas and defaults are those of Tinker's API (https://tinker-docs.thinkingmachines.ai/tinker/losses).
A loss is a sum over tokens, never a mean. Its gradient for the logits of a position is that of the
target's own log-probability, times one number for each target: the slope of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

Arrays = Mapping[str, np.ndarray]
Settings = Mapping[str, float]

CLIPS = ("clip_low_threshold", "clip_high_threshold")
"""Settings of the losses that clip a ratio, which rows may have for each of their tokens, too."""

_SAMPLED = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """The targets of n positions, (n,) or (n, K) int32, and the ``inputs`` of their loss: numbers
    of n positions, ``weights`` of each target. The positions of row i end before ``ends[i]``."""

    loss: TokenLoss
    targets: np.ndarray
    inputs: Arrays
    ends: np.ndarray


Values = Callable[[np.ndarray, TokenTerms, Settings], np.ndarray]
"""Function of log-probabilities (n,), float64: returns each token's loss, or its slope."""


@dataclass(frozen=True, slots=True)
class LossFacts:
    """A loss: the value and the slope of each token, the inputs that rows must have, those that
    they may have, and its settings with their defaults. An optional input that a row lacks has the
    value of the setting of its name, or 1. ``several_targets`` tells whether a position may have K
    targets."""

    values: Values
    slopes: Values
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)
    several_targets: bool = False


def _ratios(logps: np.ndarray, terms: TokenTerms) -> np.ndarray:
    """Return the ratio of each token's probability now to that when it was sampled."""
    ratios: np.ndarray = np.exp(logps - terms.inputs["logprobs"])
    return ratios


def _sequence_ratios(logps: np.ndarray, terms: TokenTerms) -> np.ndarray:
    """Return for each token the geometric mean of the ratios of its row's marked tokens."""
    gains = logps - terms.inputs["logprobs"]
    marked = terms.inputs["sequence_ratio_mask"] != 0
    starts = np.concatenate([[0], terms.ends[:-1]])
    counts = np.add.reduceat(marked.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(marked, gains, 0.0), starts)
    means: np.ndarray = np.exp(sums / counts)
    return np.repeat(means, np.diff(terms.ends, prepend=0))


def _clips(terms: TokenTerms, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper threshold of each token: its own ones, or those of all."""
    count = len(terms.targets)
    low, high = (terms.inputs.get(name, np.full(count, settings[name])) for name in CLIPS)
    return low, high


def _clipped(ratios: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    """Return the objective of PPO for each token: the lesser of the clipped one and the other."""
    advantages = terms.inputs["advantages"]
    within = np.clip(ratios, *_clips(terms, settings))
    lesser: np.ndarray = np.minimum(ratios * advantages, within * advantages)
    return lesser


def _clipped_slopes(ratios: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    """Return the slope of that loss. It is 0 where clipping makes the objective less."""
    advantages = terms.inputs["advantages"]
    within = np.clip(ratios, *_clips(terms, settings))
    is_free = ratios * advantages <= within * advantages
    return np.where(is_free, -ratios * advantages, 0.0)


def _cross_entropy(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    weighted: np.ndarray = -logps * terms.inputs["weights"]
    return weighted


def _cross_entropy_slopes(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    return -terms.inputs["weights"]


def _importance(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    values: np.ndarray = -_ratios(logps, terms) * terms.inputs["advantages"]
    return values


def _ppo(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    return -_clipped(_ratios(logps, terms), terms, settings)


def _ppo_slopes(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    return _clipped_slopes(_ratios(logps, terms), terms, settings)


def _cispo_slopes(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    within = np.clip(_ratios(logps, terms), *_clips(terms, settings))
    slopes: np.ndarray = -within * terms.inputs["advantages"]
    return slopes


def _cispo(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    values: np.ndarray = _cispo_slopes(logps, terms, settings) * logps
    return values


def _dro(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    penalty = 0.5 * settings["beta"] * np.square(logps - terms.inputs["logprobs"])
    values: np.ndarray = penalty - logps * terms.inputs["advantages"]
    return values


def _dro_slopes(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    pull = settings["beta"] * (logps - terms.inputs["logprobs"])
    slopes: np.ndarray = pull - terms.inputs["advantages"]
    return slopes


def _gspo(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    return -_clipped(_sequence_ratios(logps, terms), terms, settings)


def _gspo_slopes(logps: np.ndarray, terms: TokenTerms, settings: Settings) -> np.ndarray:
    # Each token has the value of its row's ratio, and the gradient of its own probability.
    return _clipped_slopes(_sequence_ratios(logps, terms), terms, settings)


def _clip(low: float, high: float) -> Settings:
    return dict(zip(CLIPS, (low, high), strict=True))


LOSSES: Mapping[str, LossFacts] = MappingProxyType(
    {
        "cross_entropy": LossFacts(
            _cross_entropy, _cross_entropy_slopes, (), ("weights",), several_targets=True
        ),
        # The value's slope is the value: it is a multiple of the exponential.
        "importance_sampling": LossFacts(_importance, _importance, _SAMPLED),
        "ppo": LossFacts(_ppo, _ppo_slopes, _SAMPLED, CLIPS, _clip(0.8, 1.2)),
        "cispo": LossFacts(_cispo, _cispo_slopes, _SAMPLED, CLIPS, _clip(0.0, 4.0)),
        "dro": LossFacts(_dro, _dro_slopes, _SAMPLED, settings={"beta": 0.1}),
        "gspo": LossFacts(
            _gspo,
            _gspo_slopes,
            (*_SAMPLED, "sequence_ratio_mask"),
            CLIPS,
            # The ranges of its paper, Zheng et al., arXiv:2507.18071.
            _clip(1 - 3e-4, 1 + 4e-4),
        ),
    }
)
"""The losses by their names."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss of ``LOSSES``, by its ``name``, with its settings, of which some may be missing."""

    name: str
    given: Settings = field(default_factory=dict)

    @property
    def facts(self) -> LossFacts:
        """The loss itself."""
        return LOSSES[self.name]

    @property
    def settings(self) -> Settings:
        """The settings, with the defaults of those that are not given."""
        return {**self.facts.settings, **self.given}

    def known_slopes(self, terms: TokenTerms) -> np.ndarray | None:
        """Return the slopes, of the targets' shape, if no log-probability changes them."""
        return -terms.inputs["weights"] if self.name == "cross_entropy" else None

    def flat(self, terms: TokenTerms) -> np.ndarray:
        """Return which of the n positions have a slope of 0 for any log-probabilities, as those of
        a prompt."""
        name = "weights" if self.facts.several_targets else "advantages"
        is_zero = (terms.inputs[name] == 0).reshape(len(terms.targets), -1)
        is_flat: np.ndarray = is_zero.all(axis=1) & (self.name != "dro")
        return is_flat

    def slopes(self, logps: np.ndarray, terms: TokenTerms) -> np.ndarray:
        """Return the gradient of the loss for log-probabilities (n,), as float32 (n,)."""
        found = self.facts.slopes(logps.astype(np.float64), terms, self.settings)
        return found.astype(np.float32)

    def value(self, logps: np.ndarray, terms: TokenTerms) -> float:
        """Return the loss of all tokens for log-probabilities of the targets' shape."""
        return float(self.facts.values(logps.astype(np.float64), terms, self.settings).sum())
