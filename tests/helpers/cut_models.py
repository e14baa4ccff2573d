"""Models in stages, beside the same models whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from shardmlx.models.slice import Slice
from tests.helpers.models_and_batches import logits_of


def check_logits(model: nn.Module, cuts: Sequence[tuple[int, int]], tokens: mx.array) -> None:
    """Raise ``AssertionError`` unless the logits of stages are those of the model, to the bit."""
    slices = [Slice(model, start, stop) for start, stop in cuts]
    x = tokens
    for part in slices[:-1]:
        x = part(x)
    assert mx.array_equal(logits_of(slices[-1], x), model(tokens))


def check_continued(model: nn.Module, cuts: Sequence[tuple[int, int]], ends: Sequence[int]) -> None:
    """Check the logits of a text that comes in pieces with these ends, and is kept in caches."""
    tokens = mx.array(np.random.RandomState(5).randint(1, 90, (1, ends[-1])))
    theirs = make_prompt_cache(model)
    slices = [Slice(model, start, stop) for start, stop in cuts]
    ours = [part.new_caches() for part in slices]
    for start, stop in pairwise([0, *ends]):
        x = tokens[:, start:stop]
        expected = model(x, cache=theirs)[:, -1]
        for part, caches in zip(slices, ours, strict=True):
            x = part.extend(x, caches)
        assert mx.array_equal(slices[-1].last_logits(x), expected), (start, stop)
