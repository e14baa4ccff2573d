"""Sampling of the next tokens, on the last stage, by mlx-lm's samplers.

Each sequence has a random stream of its own, so that its tokens depend neither on the layout nor on
the other sequences of its group.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler, make_logits_processors, make_sampler

from shardmlx.compat import random_key
from shardmlx.inference.drafts import accepted
from shardmlx.inference.grammars import Grammars, Matcher
from shardmlx.inference.sampling_params import BROKEN, SampledToken, SamplingParams

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""A function of mlx-lm: tokens so far and logits (1, V), to logits (1, V)."""


def random_state(key: mx.array | None = None) -> int:
    """Return MLX's random state on this thread, or ``key``, as ``mx.random.seed`` takes it."""
    high, low = np.array(random_key() if key is None else key).tolist()
    return int(high) << 32 | int(low)


@dataclass(slots=True)
class _SequenceState:
    """The ``state`` of a sequence's random stream, ``after`` the lazy ones after each token sampled
    last; ``history`` are its tokens, where a processor looks back at them. ``next`` is the token
    sampled last, if all drafts before it were right."""

    params: SamplingParams
    state: int
    sampler: Sampler | None
    processors: Sequence[LogitsProcessor]
    history: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    after: list[mx.array] = field(default_factory=list)
    next: int | None = None


@dataclass
class BatchSampler:
    """A sampler for all sequences under way. ``start`` is the run's own random state."""

    start: int
    grammars: Grammars | None = None
    _sequences: dict[int, _SequenceState] = field(default_factory=dict)

    def open(self, sequence: int, params: SamplingParams) -> None:
        sampler = make_sampler(
            params.temp,
            params.top_p,
            params.min_p,
            params.min_tokens_to_keep,
            params.top_k,
            params.xtc_probability,
            params.xtc_threshold,
            list(params.xtc_special_tokens),
        )
        processors = make_logits_processors(
            dict(params.logit_bias),
            params.repetition_penalty,
            params.repetition_context_size,
            params.presence_penalty,
            params.presence_context_size,
            params.frequency_penalty,
            params.frequency_context_size,
        )
        matcher = None
        if params.grammar is not None:
            assert self.grammars is not None, "rank 0 takes no grammars where there are none"
            matcher = self.grammars.matcher(params.grammar)
        start = self.start if params.seed is None else params.seed
        self._sequences[sequence] = _SequenceState(
            params,
            _stream(start, params.stream),
            sampler if params.temp > 0 else None,
            processors,
            list(params.context),
            matcher,
        )

    def close(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sequences.pop(sequence, None)

    def sample(
        self, sequences: Sequence[int], logits: mx.array, drafts: Sequence[int] = ()
    ) -> mx.array:
        """Sample a token from each row of ``logits`` (rows, V), one row for each sequence. With
        ``drafts`` there is one sequence: after its tokens comes a row, and after each draft, as if
        it had been sampled. Returns int32 (rows, ``packed_width``), for ``unpack``, lazy: evaluate
        it, then call ``settle``."""
        known = [self._sequences[sequence] for sequence in sequences] * (1 + len(drafts))
        if any(sequence.processors or sequence.matcher for sequence in known):
            rows = [
                _processed(sequence, logits[i : i + 1], drafts[:i])
                for i, sequence in enumerate(known)
            ]
            logits = mx.concatenate(rows)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if any(sequence.sampler for sequence in known):
            rows = [_sampled(sequence, logprobs[i : i + 1]) for i, sequence in enumerate(known)]
            tokens = mx.concatenate(rows)
        else:
            tokens = mx.argmax(logprobs, axis=-1)
        tokens = tokens.astype(mx.int32)
        errors = [sequence.matcher.error if sequence.matcher else "" for sequence in known]
        for error in filter(None, errors):
            print(f"shardmlx: an answer breaks off within its grammar: {error}", file=sys.stderr)
        if any(errors):
            tokens = mx.where(mx.array([error != "" for error in errors]), BROKEN, tokens)
        return _pack(tokens, logprobs, packed_width([sequence.params for sequence in known]))

    def settle(
        self,
        sequences: Sequence[int],
        tokens: Sequence[int],
        drafts: Sequence[int] = (),
        guess: int | None = None,
    ) -> None:
        """Take in the tokens sampled last, which have been evaluated: of one with ``drafts`` those
        up to the first that differs from its draft; none if it began with a wrong ``guess``."""
        rows = [tokens[: 1 + accepted(drafts, tokens)]] if drafts else [[each] for each in tokens]
        for sequence, came in zip(sequences, rows, strict=True):
            known = self._sequences[sequence]
            is_void = guess is not None and guess != known.next
            known.next = None if is_void or len(came) <= len(drafts) else came[-1]
            if is_void:
                known.after = []
                continue
            if known.after:
                known.state = random_state(known.after[len(came) - 1])
                known.after = []
            if known.processors:
                known.history += came
            if known.matcher is not None and came[-1] != BROKEN:
                known.matcher.take(came[-1])


def _processed(sequence: _SequenceState, logits: mx.array, drafts: Sequence[int]) -> mx.array:
    for process in sequence.processors:
        logits = process(mx.array([*sequence.history, *drafts], mx.int32), logits)
    if sequence.matcher is not None:
        logits = mx.where(sequence.matcher.allowed(), logits, -mx.inf)
    return logits


def _sampled(sequence: _SequenceState, logprobs: mx.array) -> mx.array:
    if sequence.sampler is None:
        return mx.argmax(logprobs, axis=-1)
    if not sequence.after:  # with drafts MLX's state is that after the sequence's token before
        mx.random.seed(sequence.state)
    token: mx.array = sequence.sampler(logprobs)
    sequence.after.append(random_key())
    return token


def packed_width(params: Sequence[SamplingParams]) -> int:
    """Return how many int32 numbers a sampled token takes in a batch of such sequences: itself and,
    if any sequence wants log-probabilities, its own (as the bits of a float32), then the likeliest
    tokens, then theirs."""
    return max(1 if each.logprobs is None else 2 + 2 * each.logprobs for each in params)


def _pack(tokens: mx.array, logprobs: mx.array, width: int) -> mx.array:
    tokens = tokens[:, None]
    if width == 1:
        return tokens
    logprobs = logprobs.astype(mx.float32)
    parts = [tokens, mx.take_along_axis(logprobs, tokens, axis=-1).view(mx.int32)]
    if wanted := (width - 2) // 2:
        likeliest = mx.argpartition(-logprobs, wanted - 1, axis=-1)[:, :wanted]
        theirs = mx.take_along_axis(logprobs, likeliest, axis=-1)
        parts += [likeliest.astype(mx.int32), theirs.view(mx.int32)]
    return mx.concatenate(parts, axis=-1)


def unpack(row: np.ndarray, params: SamplingParams) -> SampledToken:
    """Read a row of what ``BatchSampler.sample`` returned."""
    token = int(row[0])
    if params.logprobs is None:
        return SampledToken(token)
    ids, values = row[2 : 1 + len(row) // 2].tolist(), row.copy().view(np.float32).tolist()
    likeliest = zip(ids, values[1 + len(row) // 2 :], strict=True)
    top = sorted(likeliest, key=lambda each: (-each[1], each[0]))[: params.logprobs]
    return SampledToken(token, values[1], tuple(top))


def _stream(start: int, number: int) -> int:
    """Return the first state of random stream ``number``; stream 0 goes on from ``start``."""
    if number == 0:
        return start
    digest = hashlib.blake2b(repr((start, number)).encode(), digest_size=8).digest()
    return int.from_bytes(digest)
