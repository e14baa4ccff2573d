"""Parameters and results of sampling. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence, in the words of ``mlx_lm.sample_utils``.

    ``stream`` numbers the random streams, which are derived from ``seed``, or from the run's own.
    A penalty looks back ``*_context_size`` tokens; ``context`` holds those of the prompt. A token
    comes with its log-probability, and those of the ``logprobs`` likeliest, if that is not None.
    With a ``grammar`` only tokens that keep to it are sampled.
    """

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    context: tuple[int, ...] = ()
    seed: int | None = None
    stream: int = 0
    logprobs: int | None = None
    grammar: str | None = None

    @property
    def looked_back(self) -> int:
        """The number of tokens before the next at which penalties look."""
        penalties = (
            (self.repetition_penalty, self.repetition_context_size),
            (self.presence_penalty, self.presence_context_size),
            (self.frequency_penalty, self.frequency_context_size),
        )
        return max((size for penalty, size in penalties if penalty != 0), default=0)


BROKEN = -1
"""The number in the place of a token where the answer cannot go on within its grammar."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was sampled, or ``BROKEN``; where ``SamplingParams`` ask for it, with its
    ``logprob``, and ``top``: pairs of (token, log-probability), the likeliest first."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
