"""Models that differ in more than their family, cut into stages, are mlx-lm's whole model.

The plain model of each family is in test_conformance.py.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.engine.batches import MicroBatch
from tests.helpers.models_and_batches import (
    check_same,
    move_trained,
    random_batch,
    reference,
    through_stages,
    tiny_model,
    with_adapters,
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
            with_adapters(model)
        return move_trained(model)


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_whole_model(case: Case) -> None:
    """To the bit, where the order of sums is the same."""
    expected = reference(case.build(), [BATCH])
    assert all(gradient.any() for gradient in expected[1].values())
    for ranges in CUTS:
        found = through_stages(case.build(), ranges, [BATCH])
        assert all(gradient.dtype == np.float32 for gradient in found[1].values())
        check_same(found, expected, case.most, max(case.most, 1e-6))


def test_a_sequence_of_one_token_can_be_trained_on() -> None:
    batch = MicroBatch(np.array([[3, 5]], np.int32), np.array([[0, 2]], np.int32), 0)
    model = CASES[0].build()
    check_same(through_stages(model, CUTS[1], [batch]), reference(model, [batch]))
