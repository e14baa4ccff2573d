"""Models that differ in more than their family, cut into stages, are mlx-lm's whole model.

The plain model of each family is in test_conformance.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.config.specs import RECOMPUTE, Savings
from shardmlx.engine.batches import MicroBatch, pack
from shardmlx.models.slice import Slice
from tests.helpers.models_and_batches import (
    Gradients,
    largest_difference,
    logits_of,
    mean_loss,
    random_batch,
    through_stages,
    tiny_model,
)

LAYERS = 5
CUTS = [
    [(0, 5)],
    [(0, 2), (2, 5)],
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
]
WINDOW = 8
BATCH = random_batch(3)
TOKENS = mx.array(BATCH.tokens[:, :-1])
SLIDING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if i in (0, 2, 3) else "full_attention" for i in range(5)],
}


@dataclass(frozen=True, eq=False)
class Case:
    """A small model of a family; the same one each time it is built."""

    family: str
    what: str = "untied"
    tied: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    bits: int | None = None
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        return f"{self.family}, {self.what}"

    def build(self) -> nn.Module:
        model = tiny_model(self.family, layers=LAYERS, tied=self.tied, **self.overrides)
        model.set_dtype(self.dtype)
        if self.bits is not None:
            nn.quantize(model, group_size=32, bits=self.bits)
            model.freeze()
            linear_to_lora_layers(model, LAYERS, {"rank": 4, "scale": 2.0, "dropout": 0.0})
        # No weight is zero, as lora_b is at first, or one: its gradients would hide mistakes.
        model.update(
            tree_map(
                lambda w: w + mx.random.normal(w.shape, w.dtype, scale=0.05),
                model.trainable_parameters(),
            )
        )
        mx.eval(model.parameters())
        return model


UNTIED = [Case("mistral"), Case("qwen3")]
TIED = [Case("llama", "tied", tied=True), Case("mixtral", "tied", tied=True)]
QUANTISED = [
    Case("mistral", "4-bit base with LoRA", bits=4),
    Case("mixtral", "4-bit base with LoRA", bits=4),
    Case("qwen2", "tied 4-bit base with LoRA", tied=True, bits=4),
]
WINDOWED = [
    Case(family, "sliding and full layers", overrides=SLIDING)
    for family in ("mistral", "ministral3")
]
OTHERS = [
    Case("llama", "head_dim 12, not 32 / 4", overrides={"head_dim": 12}),
    Case("llama", "biases", overrides={"attention_bias": True, "mlp_bias": True}),
    Case("llama", "all sliding but one", overrides={**SLIDING, "layer_types": [
        "full_attention", *["sliding_attention"] * 4]}),
    Case("mixtral", "3 of 8 experts", overrides={"num_local_experts": 8, "num_experts_per_tok": 3}),
]  # fmt: skip
# MLX multiplies experts on the CPU in float32 only.
BFLOAT16 = [Case(family, "bfloat16", dtype=mx.bfloat16) for family in ("mistral", "qwen3")]

EXACT = UNTIED + QUANTISED + WINDOWED + OTHERS


@cache
def whole_model(case: Case, batch: MicroBatch) -> tuple[float, Gradients]:
    """Loss and gradients of mlx-lm's model, in one process."""
    model = case.build()
    loss, gradients = nn.value_and_grad(model, mean_loss)(model, batch)
    return loss.item(), {
        name: np.array(gradient.astype(mx.float32)) for name, gradient in tree_flatten(gradients)
    }


def chain(slices: Sequence[Slice], tokens: mx.array) -> mx.array:
    x = tokens
    for part in slices[:-1]:
        x = part(x)
    return logits_of(slices[-1], x)


@pytest.mark.parametrize("case", [*EXACT, *TIED, *BFLOAT16], ids=str)
def test_logits_of_the_slices_in_a_row_are_those_of_the_whole_model(case: Case) -> None:
    model = case.build()
    expected = model(TOKENS)
    for ranges in CUTS[1:]:
        logits = chain([Slice(model, start, stop) for start, stop in ranges], TOKENS)
        assert logits.dtype == case.dtype
        assert mx.array_equal(logits, expected), ranges


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("case", QUANTISED[-1:] + WINDOWED, ids=str)
def test_in_pieces_they_are_so_but_for_rounding(case: Case, recompute: str) -> None:
    """Whatever the pieces: of attention, of the loss, what is computed again."""
    expected_loss, expected = whole_model(case, BATCH)
    savings = Savings(attention_chunk=6, loss_chunk=30, recompute=recompute)
    (loss,), gradients = through_stages(
        case.build(), CUTS[1], pack(BATCH, 1), scale=1 / BATCH.valid_tokens, savings=savings
    )
    assert loss / BATCH.valid_tokens == pytest.approx(expected_loss, rel=1e-6)
    assert set(gradients) == set(expected)
    assert largest_difference(gradients, expected)[0] < 1e-5


@pytest.mark.parametrize(
    ("case", "most"),
    [
        *((case, 0.0) for case in EXACT),
        # A tied embedding adds up over its two holders.
        *((case, 1e-6) for case in TIED),
        *((case, 1e-3) for case in BFLOAT16),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_whole_model(case: Case, most: float) -> None:
    """To the bit, where the order of sums is the same."""
    expected_loss, expected = whole_model(case, BATCH)
    assert all(gradient.any() for gradient in expected.values())
    for ranges in CUTS:
        (loss,), gradients = through_stages(
            case.build(), ranges, [BATCH], scale=1 / BATCH.valid_tokens
        )
        assert loss / BATCH.valid_tokens == pytest.approx(expected_loss, rel=max(most, 1e-6))
        assert set(gradients) == set(expected)
        assert all(gradient.dtype == np.float32 for gradient in gradients.values())
        difference, name = largest_difference(gradients, expected)
        assert difference <= most, (name, ranges)


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_the_window_matters_at_this_length(case: Case) -> None:
    wide = Case(case.family, overrides={**SLIDING, "sliding_window": 1000}).build()
    assert not mx.array_equal(case.build()(TOKENS), wide(TOKENS))


@pytest.mark.parametrize("case", [*UNTIED, WINDOWED[0]], ids=str)
def test_a_sequence_of_one_token_can_be_trained_on(case: Case) -> None:
    batch = MicroBatch(np.array([[3, 5]], np.int32), np.array([[0, 2]], np.int32), 0)
    _, expected = whole_model(case, batch)

    _, gradients = through_stages(case.build(), CUTS[1], [batch], scale=1 / batch.valid_tokens)

    assert largest_difference(gradients, expected) == (0.0, "")
