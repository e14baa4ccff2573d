"""Losses of preferences: plain functions of the log-probabilities of whole answers.

An answer's log-probability is a sum over its tokens, so only the last stage knows of an objective,
and its gradient for the logits of a token is that of the token's own loss, times one number for
each answer. Names and settings are those of TRL (https://github.com/huggingface/trl).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from shardmlx.config.objective import ObjectiveFacts, ObjectiveOptions, OwnObjective
from shardmlx.engine.batches import BASELINE, REFERENCE, WANTED, MicroBatch


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Facts of n answers, each an array (n,): the summed log-probability, now and as the run
    started, the number of tokens, whether the answer is wanted, and KTO's reference point, which
    is alike for all."""

    logps: mx.array
    references: mx.array
    tokens: mx.array
    wanted: mx.array
    baseline: mx.array

    @classmethod
    def of(cls, logps: mx.array, microbatch: MicroBatch) -> AnswerScores:
        """Return a micro-batch's answers, in the order of its ``row_numbers``."""
        answers = microbatch.answer_of[microbatch.counts]
        tokens = np.bincount(answers, minlength=len(microbatch.row_numbers))
        return cls(
            logps,
            mx.array(microbatch.known_of(REFERENCE).astype(np.float32)),
            mx.array(tokens.astype(np.float32)),
            mx.array(microbatch.known_of(WANTED) > 0),
            mx.array(microbatch.known_of(BASELINE).astype(np.float32)),
        )

    @property
    def means(self) -> mx.array:
        """Log-probability of a mean token."""
        return self.logps / self.tokens

    @property
    def gains(self) -> mx.array:
        """The log-probability that training has added."""
        return self.logps - self.references

    def pairs(self, values: mx.array) -> tuple[mx.array, mx.array]:
        """Divide values of answers into those of chosen and of rejected ones, which alternate."""
        return values[0::2], values[1::2]


Values = Callable[[AnswerScores, ObjectiveOptions], mx.array]
"""Returns the loss of each pair, or row (KTO); or the reward of each answer."""


def _log_sigmoid(values: mx.array) -> mx.array:
    return -mx.logaddexp(-values, mx.array(0.0))


def _smoothed(margins: mx.array, how: ObjectiveOptions) -> mx.array:
    """Return -log sigmoid, where a share of the pairs may be swapped (Mitchell's cDPO)."""
    share = how.label_smoothing
    return -(1 - share) * _log_sigmoid(margins) - share * _log_sigmoid(-margins)


def _log_of_others(logps: mx.array) -> mx.array:
    """Return the log-probability that it is not so, for ``logps`` below or at 0."""
    # 1 - exp has no digits left where an answer is almost certain. At 0 it is infinite.
    return mx.log(-mx.expm1(mx.minimum(logps, -1e-7)))


def dpo(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290), as hinge (SLiC,
    arXiv:2305.10425), IPO over mean tokens (arXiv:2310.12036), or robust (arXiv:2403.00409)."""
    beta, share = how.strength, how.label_smoothing
    if how.loss_type == "ipo":
        good, bad = answers.pairs(answers.gains / answers.tokens)
        return mx.square(good - bad - 1 / (2 * beta))
    good, bad = answers.pairs(answers.gains)
    margins = beta * (good - bad)
    if how.loss_type == "hinge":
        return mx.maximum(1 - margins, 0.0)
    if how.loss_type == "robust":
        wrong = share * _log_sigmoid(-margins) - (1 - share) * _log_sigmoid(margins)
        return wrong / (1 - 2 * share)
    return _smoothed(margins, how)


def orpo(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    """Odds-ratio preference optimisation (Hong et al., arXiv:2403.07691)."""
    good, bad = answers.pairs(answers.means)
    odds = (good - bad) - (_log_of_others(good) - _log_of_others(bad))
    return -good - how.strength * _log_sigmoid(odds)


def simpo(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    """Simple preference optimisation (Meng et al., arXiv:2405.14734)."""
    good, bad = answers.pairs(answers.means)
    return _smoothed(how.strength * (good - bad) - how.simpo_gamma, how)


def cpo(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    """Contrastive preference optimisation (Xu et al., arXiv:2401.08417)."""
    good, bad = answers.pairs(answers.logps)
    own, _ = answers.pairs(answers.means)
    return _smoothed(how.strength * (good - bad), how) - how.cpo_alpha * own


def kto(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    """Kahneman-Tversky optimisation of single rows (Ethayarajh et al., arXiv:2402.01306)."""
    gains = how.strength * (answers.gains - answers.baseline)
    losses = 1 - mx.sigmoid(mx.where(answers.wanted, gains, -gains))
    weights = mx.where(answers.wanted, how.desirable_weight, how.undesirable_weight)
    return weights * losses


def _gain(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    return how.strength * answers.gains


def _logp(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    return how.strength * answers.logps


def _mean_logp(answers: AnswerScores, how: ObjectiveOptions) -> mx.array:
    return how.strength * answers.means


LOSSES: Mapping[str, tuple[Values, Values]] = MappingProxyType(
    {
        "dpo": (dpo, _gain),
        "orpo": (orpo, _mean_logp),
        "simpo": (simpo, _mean_logp),
        "cpo": (cpo, _logp),
        "kto": (kto, _gain),
    }
)
"""Loss and reward of each objective of ``shardmlx.config.objective``."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective of preferences with its settings."""

    how: ObjectiveOptions

    @classmethod
    def of(cls, how: ObjectiveOptions) -> Objective | None:
        """Return the objective of some options; None for sft."""
        return None if how.preferences is None else cls(how)

    @property
    def facts(self) -> ObjectiveFacts:
        """Facts of its rows, and of what it compares with."""
        facts = self.how.preferences
        assert facts is not None, "sft has none"
        return facts

    @property
    def _values(self) -> tuple[Values, Values]:
        """Loss and reward."""
        if not isinstance(own := self.facts, OwnObjective):
            return LOSSES[self.how.objective]
        return own.loss, own.reward or (_gain if own.has_reference else _logp)

    @property
    def swaps(self) -> bool:
        """True if it needs each prompt with another's answer (KTO's reference point)."""
        return self.how.objective == "kto"

    @property
    def rewards_gains(self) -> bool:
        """True if a reward is what training has added to an answer's log-probability."""
        _, reward = self._values
        return reward is _gain

    def losses(self, logps: mx.array, microbatch: MicroBatch) -> mx.array:
        """Return the loss of each pair, or row, for log-probabilities (n,) of answers."""
        loss, _ = self._values
        return loss(AnswerScores.of(logps, microbatch), self.how)

    def slopes(self, logps: mx.array, microbatch: MicroBatch) -> np.ndarray:
        """Return the gradient of the summed loss for the log-probabilities, (n,)."""
        gradient = mx.grad(lambda logps: self.losses(logps, microbatch).sum())
        return np.array(gradient(logps))

    def rewards(self, logps: mx.array, microbatch: MicroBatch) -> np.ndarray:
        """Return the reward of each answer, (n,)."""
        _, reward = self._values
        return np.array(reward(AnswerScores.of(logps, microbatch), self.how))
