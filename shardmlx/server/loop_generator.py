"""Answers of OpenAI's API by ranks that train: streams of the training loop's sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.api.sampling import Sampler
from shardmlx.inference.drafts import DraftCounts
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.server.generator import TextInMaking
from shardmlx.server.request_queue import Delta, GenerationRequest


@dataclass(eq=False)
class _Answer:
    """An answer as a stream of the sampler; ``tell`` passes on what comes of it."""

    request: GenerationRequest
    text: TextInMaking
    tell: Callable[[Delta], None]

    @property
    def tokens(self) -> Sequence[int]:
        return self.request.tokens

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def context(self) -> int:
        return len(self.request.tokens) + self.request.max_tokens

    def take(self, sampled: SampledToken, cached: int) -> bool:
        delta = self.text.take(sampled, cached, DraftCounts())
        self.tell(delta)
        return delta.finish_reason is not None


@dataclass
class LoopGenerator:
    """The generator of a ``RequestQueue`` whose steps are those of a training loop: deltas are told
    by ``pass_on`` as they come, and not by its own steps."""

    sampler: Sampler
    tokenizer: TokenizerWrapper
    pass_on: Callable[[Sequence[tuple[int, Delta]]], None]
    is_idle: bool = False
    """Never: who waits is the loop."""
    _numbers: dict[int, int] = field(default_factory=dict)

    @property
    def kept_tokens(self) -> int:
        """Tokens in the prefix cache."""
        return self.sampler.kept_tokens

    def add(self, number: int, request: GenerationRequest) -> None:
        """Begin the answer ``number``."""
        text = TextInMaking.of(request, self.tokenizer)
        answer = _Answer(request, text, lambda delta: self._tell(number, delta))
        self._numbers[number] = self.sampler.stream(answer)

    def cancel(self, number: int) -> None:
        """Give up an answer that has not ended."""
        self.sampler.give_up(self._numbers.pop(number))

    def step(self) -> Sequence[tuple[int, Delta]]:
        """Return nothing: the loop's steps are its own."""
        return []

    def _tell(self, number: int, delta: Delta) -> None:
        if delta.finish_reason is not None:
            del self._numbers[number]
        self.pass_on([(number, delta)])
