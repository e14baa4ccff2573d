"""The choice of a text's next token, on the last stage: mlx-lm's samplers, with a random stream of
its own for each text, so that a text depends neither on the layout nor on its neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler, make_logits_processors, make_sampler

from shardmlx.compat import random_key
from shardmlx.inference.sampling_params import SampledToken, SamplingParams

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""Of mlx-lm: tokens so far and logits (1, V), to logits."""


def sampler_of(choice: SamplingParams) -> Sampler:
    """Log-probabilities (1, V) to a token (1,)."""
    return make_sampler(
        choice.temp,
        choice.top_p,
        choice.min_p,
        choice.min_tokens_to_keep,
        top_k=choice.top_k,
        xtc_probability=choice.xtc_probability,
        xtc_threshold=choice.xtc_threshold,
        xtc_special_tokens=list(choice.xtc_special_tokens),
    )


def processors_of(choice: SamplingParams) -> Sequence[LogitsProcessor]:
    """Biases and penalties."""
    made: Sequence[LogitsProcessor] = make_logits_processors(
        dict(choice.logit_bias) or None,
        choice.repetition_penalty or None,
        choice.repetition_context_size,
        choice.presence_penalty or None,
        choice.presence_context_size,
        choice.frequency_penalty or None,
        choice.frequency_context_size,
    )
    return made


def random_state() -> int:
    """MLX's random state on this thread, as ``mx.random.seed`` takes it."""
    return _as_seed(random_key())


def _as_seed(key: mx.array) -> int:
    high, low = np.array(key).tolist()
    return int(high) << 32 | int(low)


@dataclass(slots=True)
class _Text:
    """How a text's tokens are chosen. ``history`` only where a processor looks back at it."""

    choice: SamplingParams
    state: int
    sampler: Sampler | None
    processors: Sequence[LogitsProcessor]
    history: list[int] = field(default_factory=list)
    after: mx.array | None = None


class Chooser:
    """Chooses the tokens of all texts under way. ``start`` is the run's own random state."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._texts: dict[int, _Text] = {}

    def open(self, text: int, choice: SamplingParams) -> None:
        """A new text."""
        start = self._start if choice.seed is None else choice.seed
        self._texts[text] = _Text(
            choice,
            _stream(start, choice.stream),
            None if choice.is_greedy else sampler_of(choice),
            processors_of(choice),
            list(choice.context),
        )

    def close(self, texts: Sequence[int]) -> None:
        """Texts that have come to their end."""
        for text in texts:
            self._texts.pop(text, None)

    def choose(self, texts: Sequence[int], logits: mx.array) -> mx.array:
        """Logits (rows, V), a row for each text, to what ``packed_width`` says of each choice,
        int32 (rows, width); lazy until ``settle``."""
        known = [self._texts[text] for text in texts]
        if any(text.processors for text in known):
            rows = [_processed(text, logits[i : i + 1]) for i, text in enumerate(known)]
            logits = mx.concatenate(rows)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if any(text.sampler for text in known):
            rows = [_sampled(text, logprobs[i : i + 1]) for i, text in enumerate(known)]
            tokens = mx.concatenate(rows)
        else:
            tokens = mx.argmax(logprobs, axis=-1)
        return _pack(tokens.astype(mx.int32), logprobs, [text.choice for text in known])

    def settle(self, texts: Sequence[int], tokens: Sequence[int]) -> None:
        """The tokens chosen last have been evaluated, and count."""
        for text, token in zip(texts, tokens, strict=True):
            known = self._texts[text]
            if known.after is not None:
                known.state = _as_seed(known.after)
                known.after = None
            if known.processors:
                known.history.append(token)


def _processed(text: _Text, logits: mx.array) -> mx.array:
    for process in text.processors:
        logits = process(mx.array(text.history, mx.int32), logits)
    return logits


def _sampled(text: _Text, logprobs: mx.array) -> mx.array:
    if text.sampler is None:
        return mx.argmax(logprobs, axis=-1)
    mx.random.seed(text.state)
    token: mx.array = text.sampler(logprobs)
    text.after = random_key()
    return token


def packed_width(choices: Sequence[SamplingParams]) -> int:
    """How many numbers tell what was chosen for one of these texts: the token; then, if any of them
    wants log-probabilities, that of the token, and the likeliest tokens with theirs."""
    wanted = _most_logprobs(choices)
    return 1 if wanted is None else 2 + 2 * wanted


def _most_logprobs(choices: Sequence[SamplingParams]) -> int | None:
    return max((c.logprobs for c in choices if c.logprobs is not None), default=None)


def _pack(tokens: mx.array, logprobs: mx.array, choices: Sequence[SamplingParams]) -> mx.array:
    tokens = tokens[:, None]
    wanted = _most_logprobs(choices)
    if wanted is None:
        return tokens
    logprobs = logprobs.astype(mx.float32)
    parts = [tokens, mx.take_along_axis(logprobs, tokens, axis=-1).view(mx.int32)]
    if wanted:
        likeliest = mx.argpartition(-logprobs, wanted - 1, axis=-1)[:, :wanted]
        theirs = mx.take_along_axis(logprobs, likeliest, axis=-1)
        parts += [likeliest.astype(mx.int32), theirs.view(mx.int32)]
    return mx.concatenate(parts, axis=-1)


def unpack(row: np.ndarray, choice: SamplingParams) -> SampledToken:
    """What was chosen, out of a row of ``Chooser.choose``."""
    token = int(row[0])
    if choice.logprobs is None:
        return SampledToken(token)
    numbers = row[1:].copy()
    wanted = (len(numbers) - 1) // 2
    ids = numbers[1 : 1 + wanted].tolist()
    likeliest = zip(ids, numbers[1 + wanted :].view(np.float32).tolist(), strict=True)
    top = sorted(likeliest, key=lambda each: (-each[1], each[0]))[: choice.logprobs]
    return SampledToken(token, float(numbers[:1].view(np.float32)[0]), tuple(top))


def _stream(start: int, number: int) -> int:
    """The state at which random stream ``number`` begins; the first goes on from ``start``."""
    if number == 0:
        return start
    digest = hashlib.blake2b(repr((start, number)).encode(), digest_size=8).digest()
    return int.from_bytes(digest)
