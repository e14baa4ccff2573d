"""Sampling of the next tokens, on the last stage, by mlx-lm's samplers.

Each sequence has a random stream of its own, so that its tokens depend neither on the layout nor on
the other sequences of its group.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from shardmlx.compat import random_key
from shardmlx.inference.drafts import accepted
from shardmlx.inference.grammars import Grammars, Matcher
from shardmlx.inference.sampling_params import BROKEN, SampledToken, SamplingParams

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""A function of mlx-lm: last tokens and logits (1, V), to logits (1, V)."""


def random_state() -> int:
    """Return MLX's random state on this thread, as ``mx.random.seed`` takes it."""
    high, low = np.array(random_key()).tolist()
    return int(high) << 32 | int(low)


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a text: the ``key`` of its random stream, uint32 (2,), and the ``last`` tokens, at
    which penalties look, int32 (n,). Both may be lazy."""

    key: mx.array
    last: mx.array


@dataclass(slots=True)
class _SequenceState:
    """A sequence at a ``place``; ``after`` are the places after each token that was sampled last,
    of which drafts decide. ``next`` is the token sampled last, if all drafts before were right."""

    params: SamplingParams
    place: _Place
    processors: Sequence[LogitsProcessor]
    matcher: Matcher | None = None
    after: list[_Place] = field(default_factory=list)
    next: int | None = None
    is_greedy: bool = field(init=False)
    """True if the likeliest token is taken, whatever came before."""

    def __post_init__(self) -> None:
        self.is_greedy = not (self.processors or self.matcher or self.params.temp > 0)


@dataclass
class BatchSampler:
    """A sampler for all sequences under way. ``start`` is the run's own random state."""

    start: int
    grammars: Grammars | None = None
    _sequences: dict[int, _SequenceState] = field(default_factory=dict)

    def open(self, sequence: int, params: SamplingParams) -> None:
        """Begin the text of a sequence."""
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
        last = params.context[-params.looked_back :] if params.looked_back else ()
        place = _Place(_key(_stream(start, params.stream)), mx.array([*last], mx.int32))
        self._sequences[sequence] = _SequenceState(params, place, processors, matcher)

    def close(self, sequences: Collection[int]) -> None:
        """Forget texts, if they are known."""
        for sequence in sequences:
            self._sequences.pop(sequence, None)

    def needs_tokens(self, sequences: Sequence[int]) -> bool:
        """Return whether the tokens sampled last must be settled before the next are sampled."""
        return any(self._sequences[sequence].matcher is not None for sequence in sequences)

    def sample(
        self,
        sequences: Sequence[int],
        logits: mx.array,
        drafts: Sequence[int] = (),
        *,
        is_sure: bool = True,
        void: Collection[int] = (),
    ) -> mx.array:
        """Sample a token from each row of ``logits`` (rows, V), one row for each sequence; any of
        those that are ``void``.

        With ``drafts`` there is one sequence: after its tokens comes a row, and after each draft,
        as if it had been sampled. Returns integers of 32 bits (rows, ``packed_width``), for
        ``unpack``, lazy: evaluate it, then call ``settle``. Unless there are drafts, or it is not
        ``is_sure`` that the tokens before are of the text, the next tokens may be sampled before
        that.
        """
        mine = [self._sequences[sequence] for sequence in sequences if sequence not in void]
        width = packed_width([self._sequences[sequence].params for sequence in sequences])
        if all(sequence.is_greedy for sequence in mine):
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return _pack(mx.argmax(logprobs, axis=-1, keepdims=True), logprobs, width)
        if drafts or not is_sure:
            (state,) = mine
            tokens, logprobs, state.after = _chosen(state, logits, drafts)
            return _pack(tokens[:, None], logprobs, width)
        rows: list[tuple[mx.array, mx.array]] = []
        for i, sequence in enumerate(sequences):
            state = self._sequences[sequence]
            here = logits[i : i + 1]
            if sequence in void:
                rows.append((mx.zeros(1, mx.int32), here))
                continue
            token, logprobs, (state.place,) = _chosen(state, here)
            rows.append((token, logprobs))
        tokens = mx.concatenate([token for token, _ in rows])[:, None]
        return _pack(tokens, mx.concatenate([logprobs for _, logprobs in rows]), width)

    def settle(
        self,
        sequences: Sequence[int],
        tokens: Sequence[int],
        drafts: Sequence[int] = (),
        guess: int | None = None,
    ) -> None:
        """Take in the tokens sampled last, which have been evaluated: of one with ``drafts`` those
        up to the first that differs from its draft; none if it began with a wrong ``guess``, or has
        been closed."""
        rows = [tokens[: 1 + accepted(drafts, tokens)]] if drafts else [[each] for each in tokens]
        for sequence, came in zip(sequences, rows, strict=True):
            known = self._sequences.get(sequence)
            if known is None:
                continue
            is_void = guess is not None and guess != known.next
            known.next = None if is_void or len(came) <= len(drafts) else came[-1]
            if known.after and not is_void:
                known.place = known.after[len(came) - 1]
            known.after = []
            if known.matcher is not None and not is_void and came[-1] != BROKEN:
                known.matcher.take(came[-1])


def _chosen(
    state: _SequenceState, logits: mx.array, drafts: Sequence[int] = ()
) -> tuple[mx.array, mx.array, list[_Place]]:
    """Return a token for each row of a sequence's ``logits``, int32 (rows,), the log-probabilities,
    and the place after each: the rows are those after the text so far, and after each draft."""
    params, matcher = state.params, state.matcher
    last = state.place.last
    known = mx.concatenate([last, mx.array([*drafts], mx.int32)]) if drafts else last
    lasts = [known[: last.size + i] for i in range(len(drafts))] + [known]
    rows = [logits[i : i + 1] for i in range(len(lasts))]
    for i, here in enumerate(lasts):
        for process in state.processors:
            rows[i] = process(here, rows[i])
        if matcher is not None:
            rows[i] = mx.where(matcher.allowed(), rows[i], -mx.inf)
    logits = mx.concatenate(rows) if len(rows) > 1 else rows[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens: list[mx.array] = []
    places: list[_Place] = []
    key = state.place.key
    for i, here in enumerate(lasts):
        if params.temp > 0:
            token, key = _drawn(params, logprobs[i : i + 1], key)
        else:
            token = mx.argmax(logprobs[i : i + 1], axis=-1)
        token = token.astype(mx.int32)
        if matcher is not None and (error := matcher.error):
            print(f"shardmlx: an answer breaks off within its grammar: {error}", file=sys.stderr)
            token = mx.array([BROKEN], mx.int32)
        tokens.append(token)
        seen = mx.concatenate([here, token])[-params.looked_back :] if params.looked_back else last
        places.append(_Place(key, seen))
    return mx.concatenate(tokens) if len(tokens) > 1 else tokens[0], logprobs, places


def _drawn(params: SamplingParams, logprobs: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """Return a token drawn from ``logprobs`` (1, V) as by mlx-lm's ``make_sampler``, and the next
    key: MLX splits its state in the same way for each draw, but keeps it where nobody can set it to
    an array."""
    if 0 < params.top_p < 1:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p != 0:
        logprobs = apply_min_p(logprobs, params.min_p, params.min_tokens_to_keep)
    if params.xtc_probability > 0:
        key, drawn = mx.random.split(key)
        logprobs = _without_likeliest(params, logprobs, drawn)
    if params.top_k > 0:
        logprobs = apply_top_k(logprobs, params.top_k)
    key, drawn = mx.random.split(key)
    return _categorical(logprobs, params.temp, drawn), key


@mx.compile
def _categorical(logprobs: mx.array, temp: float, key: mx.array) -> mx.array:
    # Compiled like mlx-lm's own, so that sums are rounded in the same way.
    return mx.random.categorical(logprobs * (1.0 / temp), key=key)


def _without_likeliest(params: SamplingParams, logprobs: mx.array, key: mx.array) -> mx.array:
    """Leave out, by chance, all but the last of the tokens that are likelier than the threshold
    (XTC, of p-e-w), and never special ones."""
    probabilities = mx.softmax(logprobs, -1)
    are_likely = probabilities > params.xtc_threshold
    least = mx.where(are_likely, probabilities, mx.inf).min(axis=-1, keepdims=True)
    left_out = probabilities > least
    if params.xtc_special_tokens:
        left_out[..., mx.array(params.xtc_special_tokens)] = False
    is_spared = mx.random.uniform(0, 1, key=key) > params.xtc_probability
    return mx.where(is_spared, logprobs, mx.where(left_out, -mx.inf, logprobs))


def _key(state: int) -> mx.array:
    """Return the key of a state, as ``mx.random.seed`` sets it."""
    return mx.array([state >> 32 & 0xFFFFFFFF, state & 0xFFFFFFFF], mx.uint32)


def packed_width(params: Sequence[SamplingParams]) -> int:
    """Return how many int32 numbers a sampled token takes in a batch of such sequences: itself and,
    if any sequence wants log-probabilities, its own (as the bits of a float32), then the likeliest
    tokens, then theirs."""
    return max(1 if each.logprobs is None else 2 + 2 * each.logprobs for each in params)


def _pack(tokens: mx.array, logprobs: mx.array, width: int) -> mx.array:
    """Return ``tokens`` (rows, 1) in rows of this width, with what is asked for of ``logprobs``."""
    if width == 1:
        return tokens
    logprobs = logprobs.astype(mx.float32)
    parts = [tokens.astype(mx.int32), mx.take_along_axis(logprobs, tokens, axis=-1).view(mx.int32)]
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
