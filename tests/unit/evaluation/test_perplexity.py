"""Perplexity and scores through stages are those of one model."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.config.inference import EVALUATE
from shardmlx.errors import UserError
from shardmlx.evaluation.scoring import Scorer, Scores, perplexity_of
from shardmlx.evaluation.tasks import continuation, rows_of
from shardmlx.models.runtime.slice import Slice
from testbed.family_configs import CONFIGS
from testbed.tiny_models import VOCABULARY, build
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import tiny_model

LENGTHS = [2, 30, 7, 19, 30, 3, 12]

TOP = 3


def sequences() -> list[list[int]]:
    random = np.random.RandomState(4)
    return [random.randint(1, VOCABULARY, size).tolist() for size in LENGTHS]


def expected(model: nn.Module, tokens: list[int]) -> Scores:
    logits = model(mx.array(tokens[:-1])[None]).astype(mx.float32)[0]
    targets = mx.array(tokens[1:])
    logprobs = nn.log_softmax(logits)
    own = mx.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    likeliest = mx.argsort(-logprobs, axis=-1)[:, :TOP]
    of_likeliest = mx.take_along_axis(logprobs, likeliest, axis=-1)
    is_likeliest = mx.argmax(logits, axis=-1) == targets
    return Scores(*map(np.array, (own, is_likeliest, likeliest, of_likeliest)))


@pytest.mark.parametrize("ranges", [[(0, 4)], [(0, 1), (1, 3), (3, 4)]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scores_of_stages_are_those_of_the_model(family: str, ranges: list[Any]) -> None:
    model = build(CONFIGS[family])

    def work(transport: LocalTransport) -> list[Scores]:
        part = Slice(build(CONFIGS[family]), *ranges[transport.rank])
        scorer = Scorer(transport, [part], 3, 8)
        return scorer.score(sequences(), TOP)

    found = LocalNetwork(len(ranges), timeout=20).run(work)[0]
    for scores, tokens in zip(found, sequences(), strict=True):
        theirs = expected(model, tokens)
        assert np.allclose(scores.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
        assert scores.is_likeliest.tolist() == theirs.is_likeliest.tolist()
        assert scores.top.tolist() == theirs.top.tolist()
        assert np.allclose(scores.top_logprobs, theirs.top_logprobs, rtol=1e-5, atol=1e-5)


def test_the_likeliest_tokens_are_known() -> None:
    model = tiny_model(layers=2)
    tokens = [5]
    for _ in range(6):
        tokens.append(np.array(mx.argmax(model(mx.array(tokens)[None])[0, -1])).item())
    tokens[4] = (tokens[4] + 1) % VOCABULARY
    (scores,) = LocalNetwork(1).run(
        lambda transport: Scorer(transport, [Slice(model, 0, 2)], 8, 4).score([tokens])
    )[0]
    assert scores.is_likeliest[:4].tolist() == [True, True, True, False]


def test_perplexity_counts_each_token_once_from_the_start_of_the_answer() -> None:
    none = np.zeros((3, 0))
    halves = Scores(np.log([0.5, 0.25, 0.5]), np.zeros(3, bool), none, none)
    found = perplexity_of([([1, 2, 3, 4], 0), ([1, 2, 3, 4], 3)], [halves, halves])
    assert found.tokens == 4
    assert found.perplexity == pytest.approx(math.exp(math.log(2) * 5 / 4))
    losses = np.log(2) * np.array([1, 2, 1, 1])
    assert found.standard_error == pytest.approx(found.perplexity * losses.std(ddof=1) / 2)


def test_a_continuation_is_cut_at_the_beginning_of_its_context() -> None:
    def codes(text: str) -> list[int]:
        return list(text.encode())

    assert continuation(codes, "ab", "c", 10) == ([97, 98, 99], 1)
    assert continuation(codes, "abcdef", "gh", 3) == ([101, 102, 103, 104], 2)
    assert continuation(codes, "abc", "defg", 3) is None
    assert continuation(codes, "", "a", 3) is None


def test_results_become_rows() -> None:
    results = {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.25, "n,all": 3}}
    assert rows_of(results) == [("t", "acc", "0.5000", "0.2500"), ("t", "n", "3", "")]


@pytest.mark.parametrize("how", ["", "--data d --tasks t", "--data d --num-shots 2"])
def test_either_texts_or_tasks_are_evaluated(how: str) -> None:
    with pytest.raises(UserError, match=r"--(tasks|num-shots)"):
        EVALUATE.load(how.split())
    EVALUATE.load(how.split(), rank=1)  # rank 0 speaks for all
