"""The choice of a text's next token, on the last stage: mlx-lm's samplers, with a random stream of
its own for each text, so that a text depends neither on the layout nor on its neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler, make_sampler

from shardmlx.choice import Choice


def sampler_of(choice: Choice) -> Sampler:
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


def random_state() -> int:
    """MLX's random state on this thread, as ``mx.random.seed`` takes it."""
    return _as_seed(_key())


def _key() -> mx.array:
    state: Any = mx.random.state  # a list of one key, to MLX's stub an object
    key: mx.array = state[0]
    return key


def _as_seed(key: mx.array) -> int:
    high, low = np.array(key).tolist()
    return int(high) << 32 | int(low)


class Chooser:
    """Chooses the tokens of all texts under way. ``start`` is the run's own random state."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._samplers: dict[int, Sampler | None] = {}
        self._states: dict[int, int] = {}
        self._after: dict[int, mx.array] = {}

    def open(self, text: int, choice: Choice) -> None:
        """A new text."""
        self._samplers[text] = None if choice.is_greedy else sampler_of(choice)
        start = self._start if choice.seed is None else choice.seed
        self._states[text] = _stream(start, choice.stream)

    def close(self, texts: Sequence[int]) -> None:
        """Texts that have come to their end."""
        for text in texts:
            for known in (self._samplers, self._states, self._after):
                known.pop(text, None)

    def choose(self, texts: Sequence[int], logits: mx.array) -> mx.array:
        """Logits (rows, V), a row for each text, to tokens (rows,); lazy until ``settle``."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        samplers = [self._samplers[text] for text in texts]
        if not any(samplers):
            return mx.argmax(logprobs, axis=-1)
        rows = []
        for row, (text, sampler) in enumerate(zip(texts, samplers, strict=True)):
            one = logprobs[row : row + 1]
            if sampler is None:
                rows.append(mx.argmax(one, axis=-1))
                continue
            mx.random.seed(self._states[text])
            rows.append(sampler(one))
            self._after[text] = _key()
        return mx.concatenate(rows)

    def settle(self) -> None:
        """The tokens chosen last have been evaluated, and count."""
        for text, state in self._after.items():
            self._states[text] = _as_seed(state)
        self._after.clear()


def _stream(start: int, number: int) -> int:
    """The state at which random stream ``number`` begins; the first goes on from ``start``."""
    if number == 0:
        return start
    digest = hashlib.blake2b(repr((start, number)).encode(), digest_size=8).digest()
    return int.from_bytes(digest)
