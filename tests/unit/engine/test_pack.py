"""Packing: the rows of a batch one after the other in few rows, and nothing else changes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.engine.batches import Batch, MicroBatch, make_batch, pack, split
from shardmlx.models.runtime.packed_positions import PackedPositions
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.plan import Plan
from tests.helpers.call_counts import calls_in
from tests.helpers.engines import Outcome, run_engine
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import (
    Layout,
    Result,
    check_same,
    largest_difference,
    move_trained,
    random_batch,
    saving,
    through_stages,
    tiny_model,
    with_adapters,
)

SUMS = 1e-5
"""How far gradients may differ, relative: sums in float32 in another order."""


def batch_of(*lengths: int, start: int = 0) -> Batch:
    """Rows of so many tokens, 100, 101, ... in the first, 200, 201, ... in the second."""
    rows = [list(range(100 * row, 100 * row + n)) for row, n in enumerate(lengths, 1)]
    return make_batch([(row, start) for row in rows], max_seq_length=2048)


# Which positions go where.


def test_rows_lie_one_after_the_other_and_each_target_follows_its_input() -> None:
    (packed,) = pack(batch_of(3, 2), 1)
    assert packed.shape == (1, 5)
    assert packed.inputs.tolist() == [[100, 101, 102, 200, 201]]
    # After its last token mlx-lm counts one of the padding, and so does a packed row.
    assert packed.targets.tolist() == [[101, 102, 0, 201, 0]]
    assert packed.counts.tolist() == [[True] * 5]


def test_targets_of_a_prompt_do_not_count() -> None:
    (packed,) = pack(batch_of(4, 3, start=2), 1)
    assert packed.inputs.tolist() == [[100, 101, 102, 103, 200, 201, 202]]
    assert packed.counts.tolist() == [[False, True, True, True, False, True, True]]


def test_a_row_that_fills_the_width_has_no_padding_to_count() -> None:
    batch = make_batch([([7] * 50, 0), ([8] * 3, 0)], max_seq_length=40)
    (packed,) = pack(batch, 1)
    assert packed.shape == (1, 39 + 3)
    assert packed.valid_tokens == batch.valid_tokens == 39 + 3


def test_the_longest_first_each_to_the_shortest() -> None:
    packed = pack(batch_of(10, 60, 30, 40, 20, 33), 3)
    assert [sorted(set(p.places.rows.tolist())) for p in packed if p.places] == [
        [0, 1],
        [3, 4],
        [2, 5],
    ]
    assert [p.shape for p in packed] == [(1, 70), (1, 60), (1, 63)]


@pytest.mark.parametrize("seed", range(12))
def test_every_position_that_counts_is_there_once_and_none_gets_too_long(seed: int) -> None:
    random = np.random.RandomState(seed)
    rows, size = random.randint(1, 14), random.randint(1, 5)
    batch = random_batch(rows, seed)
    count = -(-rows // size)
    packed = pack(batch, count)
    assert len(packed) == count
    assert sum(each.valid_tokens for each in packed) == batch.valid_tokens
    seen = [place for each in packed if each.places for place in zip(*each.places, strict=True)]
    assert len(set(seen)) == len(seen)
    # Memory is planned for micro-batches of ``size`` rows as long as the longest.
    longest = int(np.minimum(batch.spans[:, 1], batch.shape[1]).max())
    assert all(0 < each.shape[1] <= size * longest for each in packed)


def test_of_equally_short_micro_batches_the_first_takes_the_next_row() -> None:
    packed = pack(batch_of(*[7] * 5, 3), 4)
    assert [sorted(set(p.places.rows.tolist())) for p in packed if p.places] == [
        [0, 4],
        [1, 5],
        [2],
        [3],
    ]


def test_four_times_the_rows_in_four_times_the_micro_batches_cost_four_times_the_calls() -> None:
    random = np.random.RandomState(0)
    few, many = (batch_of(*random.randint(20, 200, rows)) for rows in (128, 512))
    assert calls_in(lambda: pack(many, 128)) < 4.2 * calls_in(lambda: pack(few, 32))


def test_of_a_pair_the_prompt_is_there_once() -> None:
    """Up to its last token, after which both answers begin."""
    prompts = [[1, 2, 3], [1, 2, 3], [4], [4]]
    answers = [[20, 21], [20, 30, 31], [40, 41], [50]]
    rows = [(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    (packed,) = pack(make_batch(rows, 2048), 1, together=2, shares_prompts=True)
    assert packed.inputs.tolist() == [[1, 2, 3, 20, 21, 3, 20, 30, 31, 4, 40, 41, 4, 50]]
    assert packed.answer_of.tolist() == [[0] * 5 + [1] * 4 + [2] * 3 + [3] * 2]
    assert packed.places is not None
    whole, sources, own = packed.places.whole()
    assert whole.rows.tolist() == [0] * 5 + [1] * 6 + [2] * 3 + [3] * 2
    assert whole.positions.tolist() == [*range(5), *range(6), *range(3), *range(2)]
    assert sources.tolist() == [*range(5), 0, 1, *range(5, 14)]
    assert own.tolist() == [*range(5), *range(7, 16)]


# Who sees whom.


def drawn(mask: np.ndarray) -> str:
    return " ".join("".join("x" if seen else "." for seen in row) for row in mask)


PLACES = PackedPositions(np.array([5, 5, 5, 5, 2, 2]), np.array([0, 1, 2, 3, 0, 1]))


def test_a_position_sees_what_comes_before_it_in_its_own_text_or_its_window() -> None:
    assert drawn(PLACES.mask()) == "x..... xx.... xxx... xxxx.. ....x. ....xx"
    assert drawn(PLACES.mask(window=2)) == "x..... xx.... .xx... ..xx.. ....x. ....xx"


# The same loss and the same gradients.


def step(model: nn.Module, parts: list[MicroBatch], *, checkpoint: bool = False) -> Result:
    savings = saving(checkpoint)
    return through_stages(model, [(0, 2), (2, 4)], parts, key=(0, 1), savings=savings)


WINDOWS: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 7,
}
SPECIAL = {"llama": WINDOWS, "ministral3": WINDOWS}


@pytest.mark.parametrize(
    ("family", "dropout", "checkpoint"),
    [
        *((name, 0.5, False) for name in ("llama", "ministral3", "mixtral", "qwen2", "qwen3")),
        ("mistral", 0.0, False),
        ("mistral", 0.5, True),
    ],
)
def test_a_packed_step_is_the_step_of_its_rows(
    family: str, dropout: float, checkpoint: bool
) -> None:
    model = with_adapters(tiny_model(family, layers=4, **SPECIAL.get(family, {})), dropout=dropout)
    move_trained(model, 0.1)
    batch = random_batch(6, seed=3)
    expected = step(model, split(batch, 1, 0, 1), checkpoint=checkpoint)
    for count in (1, 2, 4):
        check_same(step(model, pack(batch, count), checkpoint=checkpoint), expected, SUMS)


@pytest.mark.parametrize("how", ["dora", "quantised", "bfloat16"])
def test_a_packed_step_of_other_weights(how: str) -> None:
    model = tiny_model(layers=4)
    if how == "quantised":
        nn.quantize(model, group_size=32, bits=4)
    if how == "bfloat16":
        model.set_dtype(mx.bfloat16)
    with_adapters(model, dora=how == "dora")
    batch = random_batch(6, seed=3)
    # Sums in bfloat16 have three digits.
    most = (0.05, 1e-3) if how == "bfloat16" else (SUMS, 1e-6)
    check_same(step(model, pack(batch, 2)), step(model, split(batch, 1, 0, 1)), *most)


def test_texts_do_not_see_each_other_to_the_bit() -> None:
    """Another first text of the same length changes nothing of the second."""
    model = tiny_model(layers=2)
    whole = Slice(model, 0, 2)

    def second(first: list[int]) -> np.ndarray:
        (packed,) = pack(make_batch([(first, 0), ([5, 6, 7], 0)], 2048), 1)
        logits = whole(mx.array(packed.inputs), places=packed.places)
        return np.array(logits[:, len(first) :])

    assert np.array_equal(second([1, 2, 3, 4]), second([90, 80, 70, 60]))


@pytest.mark.parametrize(
    "layout",
    [
        Layout("1f1b", 2),
        Layout("zb-v", 2, 2),
        Layout("interleaved-1f1b", 2, 2, 2),
        Layout("1f1b", 3),
    ],
    ids=str,
)
def test_packed_in_every_layout(layout: Layout) -> None:
    plain, packed = (layout.plan(8, 6, 2, pack=way) for way in (False, True))
    batch = random_batch(6 * layout.dp)

    def outcome(plan: Plan) -> list[Outcome]:
        return LocalNetwork(layout.ranks).run(
            lambda transport: run_engine(transport, plan, tiny_model(), batch)
        )

    outcomes = [outcome(plan) for plan in (plain, packed)]
    for losses in ("losses", "evaluated"):
        totals = [
            sum(sum(getattr(outcome, losses).values()) for outcome in ranks) for ranks in outcomes
        ]
        assert totals[1] == pytest.approx(totals[0], rel=1e-6)
    for one, other in zip(*outcomes, strict=True):
        difference, name = largest_difference(other.gradients, one.gradients)
        assert difference < SUMS, name
        assert other.norm == pytest.approx(one.norm, rel=1e-5)
