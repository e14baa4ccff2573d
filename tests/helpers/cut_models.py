"""Models in stages, beside the same models whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.specs import Savings
from shardmlx.engine.batches import KNOWN, Batch, Samples, make_batch, pack
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.objectives import Objective
from shardmlx.models.runtime.slice import Slice
from tests.helpers.models_and_batches import logits_of


def check_logits(model: nn.Module, cuts: Sequence[tuple[int, int]], tokens: mx.array) -> None:
    """Raise ``AssertionError`` unless the logits of stages are those of the model, to the bit."""
    slices = [Slice(model, start, stop) for start, stop in cuts]
    x = tokens
    for part in slices[:-1]:
        x = part(x)
    assert mx.array_equal(logits_of(slices[-1], x), model(tokens))


def pairs_of(*prompts: int) -> Batch:
    """Return pairs of answers to prompts of so many tokens."""
    random = np.random.RandomState(5)
    lengths = np.repeat(prompts, 2)
    ends = np.cumsum(lengths + random.randint(4, 20, len(lengths)))
    begins = np.append(0, ends[:-1])
    tokens = random.randint(1, 60, ends[-1]).astype(np.int32)
    for begin, other, length in zip(begins[1::2], begins[0::2], prompts, strict=True):
        tokens[begin : begin + length] = tokens[other : other + length]
    bounds = np.stack([begins, ends, lengths], axis=1)
    return make_batch(Samples(tokens, bounds, np.zeros((len(lengths), KNOWN))), 2048)


def check_pairs(model: nn.Module, cuts: Sequence[tuple[int, int]], shares_prompts: bool) -> None:
    """Check that answers have the same log-probabilities with the prompt of each pair once, and
    that the model's layers take this, or not."""
    slices = [Slice(model, start, stop) for start, stop in cuts]
    assert [part.takes_shared_prefixes for part in slices] == [shares_prompts] * len(cuts)
    savings, objective = Savings(attention_chunk=7), Objective(ObjectiveOptions(objective="dpo"))
    stages, found = build_stages(slices, savings=savings, objective=objective), []
    batch = pairs_of(9, 21)
    for part in (batch, *pack(batch, 1, 2, shares_prompts=shares_prompts)):
        x = None
        for stage in stages:
            x = stage.evaluate(part, x)
        found.append(np.array(x))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


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
