"""A model that drafts: it writes on as it would alone, whatever of it was rejected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.config.inference import InferenceConfig
from shardmlx.inference.draft_model import ENTER, ModelDrafter, find_draft_model
from shardmlx.inference.drafts import BackOff, Drafting
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.models.sizes.kv_cache import STEP, held
from testbed.tiny_models import VOCABULARY
from tests.helpers.chat_templates import tokenizer_with
from tests.helpers.generation import CHUNK, by_mlx_lm, counted, on_ranks, texts_of
from tests.helpers.models_and_batches import tiny_model
from tests.helpers.refusals import refusal


@cache
def model(layers: int = 2, thread: int = 0) -> nn.Module:
    """One for each thread: threads must not share one."""
    made = tiny_model("llama", layers=layers).eval()
    mx.eval(made.parameters())
    return made


def drafter(vocabulary: int = VOCABULARY) -> ModelDrafter:
    return ModelDrafter(model(), vocabulary, CHUNK)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.RandomState(seed + 1000 * length)
    return [int(token) for token in random.randint(1, VOCABULARY, size=length)]


def drafted(by: ModelDrafter, sequence: int, tokens: Sequence[int], count: int) -> list[int]:
    return list(by.draft(sequence, tokens, (), {0: count}.__getitem__).tokens)


def alone(tokens: Sequence[int], count: int) -> list[int]:
    return by_mlx_lm(model(), tokens, count)


def test_a_model_that_is_not_there_or_has_another_tokenizer_is_refused_by_name(small: Path) -> None:
    config = InferenceConfig.from_flat(model="large", draft=str(small))
    own = read_tokenizer(small, False, {})
    found = find_draft_model(config, own)
    assert found.path == small
    assert found.sizes.shape.vocab_size == len(own.get_vocab())
    error = refusal(find_draft_model, config, tokenizer_with(None))
    for named in (f"--draft {small}", "--model large"):
        assert named in error.problem
    for path in (small / "none", small / "config.json"):
        config = InferenceConfig.from_flat(model="large", draft=str(path))
        assert refusal(find_draft_model, config, own).problem.startswith(f"--draft {path}: ")


def test_a_draft_is_what_the_model_writes_after_any_rejection() -> None:
    by, text, random = drafter(), prompt(30), np.random.RandomState(0)
    by.read(0, text)
    for count in (3, 1, 4, 2, 5, 3):
        draft = drafted(by, 0, text, count)
        assert draft == alone(text, count)
        right = int(random.randint(0, count + 1))
        text += [*draft[:right], int(random.randint(1, VOCABULARY))]
    assert drafted(by, 0, text, 0) == []
    five = alone(text, 5)
    assert drafted(by, 0, text, 2) == five[:2]
    assert list(by.draft(0, text, five[:2], lambda _: 3).tokens) == five[2:]


def test_sequences_have_caches_of_their_own_and_a_conversation_goes_on_from_its_last() -> None:
    by, one, other = drafter(), prompt(20), prompt(20, seed=1)
    for _ in range(2):
        for number, text in enumerate((one, other)):
            draft = drafted(by, number, text, 2)
            assert draft == alone(text, 2)
            text += draft[:1]
    by.forget(0)
    assert by._last is None  # there would be caches of one more
    by.forget(1)
    kept = by._last
    other += prompt(9)
    assert drafted(by, 2, other, 2) == alone(other, 2)
    assert by._entered[2] is kept


@pytest.mark.parametrize("common", [0, 5, 350])
def test_another_text_takes_of_the_last_one_what_is_the_same_and_no_more_room(common: int) -> None:
    by, last = drafter(), prompt(1100)
    assert drafted(by, 0, last, 2) == alone(last, 2)
    by.forget(0)
    text = [*last[:common], *prompt(20, seed=1)]
    assert drafted(by, 1, text, 2) == alone(text, 2)
    room = {cache.keys.shape[2] for cache in by._entered[1].caches}
    assert max(room) <= held(len(text)) + STEP


def test_few_tokens_have_logits_before_a_draft() -> None:
    """Those of a whole chunk would take more memory than is planned."""
    by, text = drafter(), prompt(30)
    for _ in range(2):
        assert len(text) - len(by._enter(0, text).tokens) in range(1, ENTER + 1)
        text += prompt(5)


def test_tokens_that_only_one_of_the_models_has_are_neither_read_nor_guessed() -> None:
    by = drafter(vocabulary=8)
    assert max(drafted(by, 0, [1, 2, VOCABULARY + 5, 3], 9)) < 8


@pytest.mark.parametrize("temp", [0.0, 0.5])
@pytest.mark.parametrize("ranges", [[(0, 4)], [(0, 2), (2, 4)]], ids=str)
def test_a_text_is_the_same(ranges: list[tuple[int, int]], temp: float) -> None:
    models = [model(4, rank) for rank in range(3)]
    tokens = prompt(20)

    def work(first_stage: FirstStage) -> list[int]:
        first_stage.add(0, tokens, SamplingParams(temp=temp, seed=3), context=60)
        return texts_of(first_stage, {0: 30})[0]

    plain = on_ranks(models, ranges, work)
    # A draft of the same model is right where the likeliest token is taken.
    by = ModelDrafter(models[2], VOCABULARY, CHUNK)
    drafting = Drafting(by, 4, fixed=True, back_off=BackOff(cost=0.0))
    drafted, counts = on_ranks(models, ranges, counted(work), drafting=drafting)
    assert drafted == plain
    assert counts.accepted > 0
    if temp == 0:
        assert counts.accepted == counts.drafted
