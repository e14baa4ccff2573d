"""Models that differ in more than their family, cut into stages, are mlx-lm's whole model.

The plain model of each family is in test_conformance.py.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.engine.batches import MicroBatch
from tests.helpers.models_and_batches import (
    Gradients,
    largest_difference,
    mean_loss,
    random_batch,
    through_stages,
    tiny_model,
)

LAYERS = 5
CUTS = [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]]
BATCH = random_batch(3)


@dataclass(frozen=True)
class Case:
    """A small model of a family; the same one each time it is built."""

    family: str
    tied: bool = False
    bits: int | None = None
    dtype: mx.Dtype = mx.float32
    most: float = 0.0
    """Difference of gradients; 0 is to the bit."""

    def build(self) -> nn.Module:
        model = tiny_model(self.family, layers=LAYERS, tied=self.tied)
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


CASES = [
    Case("mistral"),
    # A tied embedding adds up over its two holders.
    Case("llama", tied=True, most=1e-6),
    Case("mixtral", tied=True, most=1e-6),
    Case("mixtral", bits=4),
    Case("qwen2", tied=True, bits=4),
    # MLX multiplies experts on the CPU in float32 only.
    Case("qwen3", dtype=mx.bfloat16, most=1e-3),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def whole_model(case: Case, batch: MicroBatch) -> tuple[float, Gradients]:
    model = case.build()
    loss, gradients = nn.value_and_grad(model, mean_loss)(model, batch)
    return loss.item(), {
        name: np.array(gradient.astype(mx.float32)) for name, gradient in tree_flatten(gradients)
    }


@cases
def test_gradients_are_those_of_the_whole_model(case: Case) -> None:
    """To the bit, where the order of sums is the same."""
    expected_loss, expected = whole_model(case, BATCH)
    assert all(gradient.any() for gradient in expected.values())
    for ranges in CUTS:
        (loss,), gradients = through_stages(
            case.build(), ranges, [BATCH], scale=1 / BATCH.valid_tokens
        )
        assert loss / BATCH.valid_tokens == pytest.approx(expected_loss, rel=max(case.most, 1e-6))
        assert set(gradients) == set(expected)
        assert all(gradient.dtype == np.float32 for gradient in gradients.values())
        difference, name = largest_difference(gradients, expected)
        assert difference <= case.most, (name, ranges)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_a_sequence_of_one_token_can_be_trained_on(case: Case) -> None:
    batch = MicroBatch(np.array([[3, 5]], np.int32), np.array([[0, 2]], np.int32), 0)
    _, expected = whole_model(case, batch)

    _, gradients = through_stages(case.build(), CUTS[1], [batch], scale=1 / batch.valid_tokens)

    assert largest_difference(gradients, expected) == (0.0, "")
