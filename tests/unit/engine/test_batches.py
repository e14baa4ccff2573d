"""Batches: order, content and tokens that count are those of mlx-lm on one process."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tuner.datasets import CacheDataset, TextDataset
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.trainer import iterate_batches as mlx_lm_iterate_batches

from shardmlx.engine.batches import (
    MOST_WIDTHS,
    Batch,
    Batches,
    MicroBatch,
    Sample,
    few_widths,
    in_json,
    make_batch,
    padded_width,
    random_state,
    split,
)
from shardmlx.engine.loss import token_loss
from shardmlx.models.runtime.slice import Slice
from testbed.tiny_models import VOCABULARY
from tests.helpers.models_and_batches import all_answers, logits_of, random_batch, tiny_model

SEED = 7


def samples_of(count: int, seed: int, longest: int = 90) -> list[Sample]:
    """Random sequences; half of them with a prompt that does not count."""
    random = np.random.RandomState(seed)
    samples = []
    for i in range(count):
        length = random.randint(4, longest)
        tokens = random.randint(1, VOCABULARY, size=length).tolist()
        samples.append((tokens, random.randint(0, length - 1) if i % 2 else 0))
    return samples


class _Tokenised(TextDataset):
    """A data set of mlx-lm whose rows are tokenised already."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__([{"sample": sample} for sample in samples], None)

    def process(self, row: dict[str, Sample]) -> Sample:
        return row["sample"]


def mlx_lm_batches(samples: list[Sample], *args: Any, **options: Any) -> Iterator[Any]:
    """As ``mlx_lm.lora`` gets them: from a cached data set."""
    return iter(mlx_lm_iterate_batches(CacheDataset(_Tokenised(samples)), *args, **options))


def same(ours: Batch, theirs: tuple[mx.array, mx.array]) -> bool:
    tokens, spans = map(np.array, theirs)
    return bool(
        ours.tokens.dtype == tokens.dtype
        and np.array_equal(ours.tokens, tokens)
        and np.array_equal(ours.spans, spans)
    )


def test_of_rows_without_a_token_to_learn_the_padding_does_not_count() -> None:
    """mlx-lm counts one."""
    samples = [([1, 2, 3], 3), ([1], 0), ([1, 2, 3], 2), ([1, 2, 3, 4], 9)]
    assert make_batch(samples, 64).counts.sum(axis=1).tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("max_seq_length", [2048, 40, 33, 20])
def test_the_batches_of_one_pass_are_those_of_mlx_lm(batch_size: int, max_seq_length: int) -> None:
    samples = samples_of(10, seed=1)
    np.random.seed(SEED)
    theirs = list(mlx_lm_batches(samples, batch_size, max_seq_length))
    random = np.random.RandomState(SEED)
    ours = list(Batches(samples, batch_size, max_seq_length, random))
    assert len(ours) == len(theirs) == 10 // batch_size
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_part_of_the_batches_is_spread_over_all_and_stays_the_same() -> None:
    samples, random = samples_of(11, seed=1), np.random.RandomState(SEED)
    for _ in range(2):
        batches = Batches(samples, 2, 64, random, most=3)
        assert sorted(batches.first(9)) == [0, 2, 6]
        assert len(list(batches)) == 3
    assert len(list(Batches(samples, 2, 64, random, most=9))) == 5
    assert list(Batches(samples, 2, 64, random, most=0)) == []


def test_validation_draws_in_between_as_in_the_training_loop_of_mlx_lm() -> None:
    """The loop of mlx_lm's ``train``: a batch, then validation if it is due, then the step."""
    train, valid = samples_of(10, seed=1), samples_of(7, seed=2)
    iters, steps_per_eval, val_batches = 14, 3, 2  # three passes over the training set

    def loop(batches: Any, *source: Any) -> list[Any]:
        drawn = []
        for step, batch in zip(
            range(1, iters + 1), batches(train, 2, 64, *source, loop=True), strict=False
        ):
            drawn.append(batch)
            if step in (1, iters) or step % steps_per_eval == 0:
                drawn += islice(batches(valid, 2, 64, *source), val_batches)
        return drawn

    np.random.seed(SEED)
    theirs = loop(mlx_lm_batches)
    ours = loop(Batches, np.random.RandomState(SEED))

    assert len(ours) == len(theirs) == iters + 6 * val_batches
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


class _Loop:
    """A training loop that validates every third step, which can be left and gone on with."""

    def __init__(self) -> None:
        self._train, self._valid = samples_of(10, seed=1), samples_of(7, seed=2)
        self._random = np.random.RandomState(SEED)
        self._batches = Batches(self._train, 2, 64, self._random, loop=True)

    def step(self, step: int) -> list[Batch]:
        drawn = [next(self._batches)]
        if step % 3 == 0:
            drawn += islice(Batches(self._valid, 2, 64, self._random), 2)
        return drawn

    def state(self) -> str:
        return json.dumps(in_json([random_state(self._random), self._batches.position()]))

    def restore(self, text: str) -> None:
        random, position = json.loads(text)
        self._random.set_state(random)
        self._batches.go_to(position)


@pytest.mark.parametrize("left_after", range(17))
def test_from_any_place_the_same_batches_follow_as_if_nothing_had_been(left_after: int) -> None:
    """Of five batches an epoch, with validation in between, which draws from the same state."""
    whole = _Loop()
    for step in range(left_after):
        whole.step(step)
    again = _Loop()
    again.restore(whole.state())
    assert again.state() == whole.state()
    for step in range(left_after, left_after + 12):
        for ours, theirs in zip(again.step(step), whole.step(step), strict=True):
            assert np.array_equal(ours.tokens, theirs.tokens)
            assert np.array_equal(ours.spans, theirs.spans)


def test_the_state_of_a_generator_survives_its_text() -> None:
    random, again = np.random.RandomState(3), np.random.RandomState(4)
    random.standard_normal()  # keeps the second of two for the next call
    random.randint(9, size=700)
    again.set_state(json.loads(json.dumps(in_json(random_state(random)))))
    assert random.standard_normal(9).tolist() == again.standard_normal(9).tolist()
    assert random.permutation(99).tolist() == again.permutation(99).tolist()


def test_a_position_becomes_numbers_only_in_json() -> None:
    state = random_state(np.random.RandomState(3))
    key = state["state"]["key"]
    assert isinstance(key, np.ndarray)
    assert in_json({"random": state, "next": 4}) == {
        "random": {**state, "state": {"key": key.tolist(), "pos": state["state"]["pos"]}},
        "next": 4,
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_seq_length", [2048, 64, 33, 20])
def test_the_summed_loss_is_the_mean_of_mlx_lm_times_its_tokens(
    seed: int, max_seq_length: int
) -> None:
    model = tiny_model(layers=2)
    batch = make_batch(samples_of(5, seed), max_seq_length)
    mean, tokens = default_loss(model, mx.array(batch.tokens), mx.array(batch.spans))
    loss = token_loss(model(mx.array(batch.tokens[:, :-1])), *all_answers(batch))
    assert batch.valid_tokens == tokens.item()
    assert (loss / tokens).item() == pytest.approx(mean.item(), rel=1e-6)


@settings(deadline=None)
@given(
    rows_per_replica=st.integers(1, 9), dp=st.integers(1, 4), micro_batch_size=st.integers(1, 10)
)
def test_micro_batches_cover_every_row_once_in_order(
    rows_per_replica: int, dp: int, micro_batch_size: int
) -> None:
    batch = random_batch(rows_per_replica * dp)
    replicas = [split(batch, dp, replica, micro_batch_size) for replica in range(dp)]
    parts = [part for replica in replicas for part in replica]
    assert [row for part in parts for row in range(part.first_row, _end(part))] == [
        *range(rows_per_replica * dp)
    ]
    assert all(len(part.tokens) == micro_batch_size for parts in replicas for part in parts[:-1])
    assert sum(part.valid_tokens for part in parts) == batch.valid_tokens
    for part in parts:
        rows = slice(part.first_row, _end(part))
        width = part.tokens.shape[1]
        assert np.array_equal(part.tokens, batch.tokens[rows, :width])
        assert not batch.tokens[rows, width:].any()
        assert np.array_equal(part.spans, batch.spans[rows])


def _end(part: MicroBatch) -> int:
    return part.first_row + len(part.tokens)


def test_padding_that_no_row_of_a_micro_batch_needs_is_trimmed() -> None:
    batch = make_batch([([1] * 90, 0), ([1] * 5, 0), ([1] * 40, 0)], 2048)
    assert batch.tokens.shape == (3, 97)
    widths = [part.tokens.shape[1] for part in split(batch, 1, 0, 1)]
    assert widths == [97, 33, 65]


def lengths_of(mean: float, spread: float, most: int) -> np.ndarray:
    """Return the lengths of 2,000 texts, lognormal, as those of chats are."""
    drawn = np.random.RandomState(SEED).lognormal(np.log(mean), spread, 2000)
    return np.asarray(np.clip(drawn.astype(int), 2, most))


def test_short_texts_are_padded_as_by_mlx_lm() -> None:
    assert few_widths(lengths_of(60, 0.3, most=280), 2048) == ()
    assert few_widths(np.arange(1, 32 * MOST_WIDTHS), 2048) == ()


@pytest.mark.parametrize("max_seq_length", [2048, 8192, 32768])
def test_of_long_texts_32_widths_take_at_most_5_percent_more_tokens(max_seq_length: int) -> None:
    lengths = lengths_of(max_seq_length / 4, 0.9, most=2 * max_seq_length)
    widths = few_widths(lengths, max_seq_length)
    padded = np.minimum(padded_width(lengths), max_seq_length)
    assert len(widths) == MOST_WIDTHS < len(set(padded.tolist()))
    assert set(widths) < set(padded.tolist())
    assert widths[-1] == max_seq_length
    assert few_widths(lengths[::-1], max_seq_length) == widths
    taken = np.array(widths)[np.searchsorted(widths, padded)]
    assert padded.sum() < taken.sum() <= 1.05 * padded.sum()


def test_micro_batches_have_the_widths_given_and_where_none_has_room_their_own() -> None:
    texts: list[Sample] = [([1] * length, 0) for length in (5, 40, 90, 130)]
    batch = make_batch(texts, 150, widths=(65, 129))
    assert batch.tokens.shape[1] == 150
    assert [part.tokens.shape[1] for part in split(batch, 1, 0, 1)] == [65, 65, 129, 150]
    assert [part.tokens.shape[1] for part in split(batch, 1, 0, 2)] == [65, 150]
    assert make_batch(texts[:3], 150, widths=(65, 129)).tokens.shape[1] == 129


@pytest.mark.parametrize("widths", [(), (129, 161)])
@pytest.mark.parametrize("max_seq_length", [2048, 50])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_trimming_and_splitting_leave_the_loss_as_it_is(
    micro_batch_size: int, max_seq_length: int, widths: tuple[int, ...]
) -> None:
    whole = Slice(tiny_model(layers=2), 0, 2)
    random = np.random.RandomState(3)
    samples = [
        (random.randint(1, VOCABULARY, size=length).tolist(), start)
        for length, start in ((100, 3), (61, 0), (48, 30), (31, 0), (4, 2))
    ]
    batch = make_batch(samples, max_seq_length)
    padded = make_batch(samples, max_seq_length, widths)

    def loss(part: MicroBatch) -> float:
        logits = logits_of(whole, mx.array(part.tokens[:, :-1]))
        return float(np.array(token_loss(logits, *all_answers(part))))

    parts = split(padded, 1, 0, micro_batch_size)
    assert parts[-1].tokens.shape[1] == min(widths[0] if widths else 33, max_seq_length)
    assert sum(map(loss, parts)) == pytest.approx(loss(batch), rel=1e-6)
