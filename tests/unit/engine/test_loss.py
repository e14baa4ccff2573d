"""The loss in pieces of positions: value and gradients of all heads, and what it has in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.config.specs import Savings
from shardmlx.engine.batches import MicroBatch, make_batch, pack, split
from shardmlx.engine.loss import Head, HeadInput, token_loss
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.runtime.tuner import LoRALinear
from testbed.tiny_models import build, tiny_config
from tests.helpers.models_and_batches import (
    check_same,
    random_batch,
    through_stages,
    tiny_model,
    with_adapters,
)

PIECES = Savings(loss_chunk=7)
COUNTED = Savings(loss_chunk=512, counted_only=True)
RANGES = [(0, 2), (2, 4)]


@dataclass(frozen=True)
class Case:
    """A head, and what is trained of it."""

    name: str
    tied: bool = False
    trains: str = "layers"
    bits: int | None = None

    def model(self) -> nn.Module:
        overrides: dict[str, Any] = {"tie_word_embeddings": self.tied}
        if self.bits is not None:
            overrides["quantization"] = {"group_size": 32, "bits": self.bits}
        model = build(tiny_config("llama", layers=4, **overrides))
        if self.bits is not None or self.trains == "adapters":
            with_adapters(model, keys=["self_attn.q_proj"])
        elif self.trains == "layers":
            model.freeze()
            for layer in model.layers:
                layer.unfreeze()
        if self.trains == "adapters":
            model.lm_head = _lora(model.lm_head)
        return model

    def __str__(self) -> str:
        return self.name


def _lora(linear: nn.Module) -> nn.Module:
    adapted = LoRALinear.from_base(linear, r=4, dropout=0.3, scale=2.0)
    adapted.lora_b = 0.1 * mx.random.normal(adapted.lora_b.shape, key=mx.random.key(1))
    adapted.linear.freeze()
    return adapted


CASES = [
    Case("frozen"),
    Case("frozen and tied", tied=True),
    Case("frozen, 4 bits", bits=4),
    Case("trained", trains="all"),
    Case("trained and tied", tied=True, trains="all"),
    Case("adapters with dropout", trains="adapters"),
]


@pytest.mark.parametrize("savings", [PIECES, COUNTED], ids=["pieces", "counted"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_those_of_all_logits(
    case: Case, is_packed: bool, savings: Savings
) -> None:
    batch = random_batch(6)
    parts = pack(batch, 3) if is_packed else split(batch, 1, 0, 2)
    expected = through_stages(case.model(), RANGES, parts, key=(0, 1))
    found = through_stages(case.model(), RANGES, parts, key=(0, 1), savings=savings)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    check_same(found, expected, 5e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_in_16_bits_the_loss_of_all_logits_is_that_of_mlx_lm_to_the_bit(dtype: mx.Dtype) -> None:
    logits = (4 * mx.random.normal((2, 9, 97), key=mx.random.key(2))).astype(dtype)
    targets = mx.random.randint(0, 97, (2, 9), key=mx.random.key(3))
    counts = mx.arange(18).reshape(2, 9) % 3 > 0
    expected = (nn.losses.cross_entropy(logits, targets) * counts).astype(mx.float32).sum()
    assert token_loss(logits, targets, counts).item() == expected.item()


def test_a_micro_batch_without_answers_has_no_loss_and_no_gradient() -> None:
    nothing = MicroBatch(np.ones((2, 21), np.int32), np.array([[1, 0]] * 2, np.int32), 0)
    assert not nothing.counts.any()
    losses, gradients = through_stages(tiny_model(layers=4), RANGES, [nothing], savings=PIECES)
    assert losses == [0]
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_chunk_of_all_positions_is_no_chunk() -> None:
    batch = random_batch(2, longest=20)
    (whole,) = split(batch, 1, 0, 2)
    size = whole.shape[0] * whole.shape[1]
    expected = through_stages(tiny_model(layers=4), RANGES, [whole])
    for chunk in (size, 10 * size):
        savings = Savings(loss_chunk=chunk)
        found = through_stages(tiny_model(layers=4), RANGES, [whole], savings=savings)
        assert found[0] == expected[0]
        check_same(found, expected)


@pytest.mark.parametrize(("savings", "widest"), [(Savings(loss_chunk=8), 4), (COUNTED, 18)])
def test_prompts_that_do_not_count_have_no_logits(
    monkeypatch: pytest.MonkeyPatch, savings: Savings, widest: int
) -> None:
    part = Slice(tiny_model(layers=1), 0, 1)
    widths: list[int] = []

    def logits(x: mx.array, **how: object) -> mx.array:
        widths.append(x.shape[1])
        return x

    monkeypatch.setattr(part, "logits", logits)
    head = Head(part, savings, compiled=False)
    batch = make_batch([([1] * 20, 15), ([2] * 12, 0)], 2048)
    (micro_batch,) = split(batch, 1, 0, 2)
    states = mx.zeros((*micro_batch.shape, part.hidden_size))
    head.result(HeadInput(states, micro_batch))
    assert sum(widths) == micro_batch.valid_tokens < 20
    assert max(widths) == widest


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("is_trained", [False, True])
def test_logits_of_one_piece_are_in_memory(is_trained: bool, dtype: mx.Dtype) -> None:
    chunk, vocabulary = 96, 30_000
    model = build(tiny_config("llama", layers=1, vocab_size=vocabulary))
    model.set_dtype(dtype)
    if not is_trained:
        model.freeze()
    part = Slice(model, 0, 1)
    head = Head(part, Savings(loss_chunk=chunk), compiled=False)
    batch = random_batch(8, vocab=vocabulary, longest=90)
    (whole,) = split(batch, 1, 0, 8)
    assert whole.valid_tokens > 3 * chunk
    states = mx.random.normal((*whole.shape, part.hidden_size)).astype(dtype)
    mx.eval(states, model.parameters())
    logits, weights = chunk * vocabulary * (dtype.size + 8), vocabulary * part.hidden_size * 4
    given, small = HeadInput(states, whole, 1e-3), 1 << 18
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = head.result_and_gradient(given)[:2]
    mx.eval(result)
    assert mx.get_peak_memory() - before <= logits + small
    assert mx.get_active_memory() - before <= small  # nothing of the logits is left
    mx.reset_peak_memory()
    mx.eval(head.result(given))
    assert mx.get_peak_memory() - before <= logits + small
    mx.reset_peak_memory()
    sums: dict[str, mx.array] = {}
    head.add_gradients(given, sums)
    mx.eval(sums)
    assert bool(sums) == is_trained
    # The sum so far, a piece's gradient, and their sum.
    assert mx.get_peak_memory() - before <= is_trained * (logits + 3 * weights) + small
