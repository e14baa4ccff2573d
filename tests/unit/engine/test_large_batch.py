"""LAMB and LARS, beside what timm 1.0.31 computes from the same weights and gradients."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.optimizers import Optimizer

from shardmlx.engine.large_batch import LAMB, LARS

MADE_BY_TIMM: dict[str, tuple[Optimizer, list[Any]]] = {
    "lamb": (
        LAMB(0.1, weight_decay=0.01),
        [
            [
                [-0.512867, 2.024731, 0.223458, 1.082709],
                [-0.421319, 0.337421, 0.343462, 1.214337],
                [0.000689, -2.405898, -0.53541, 0.558664],
            ],
            [-0.125688, 0.523285, -0.02693, -1.369928],
        ],
    ),
    "lars": (
        LARS(10.0, weight_decay=0.01),
        [
            [
                [-0.205937, 2.0564, 0.284757, 1.278643],
                [-0.198144, -0.003872, 0.701516, 0.850404],
                [-0.106932, -2.365513, -0.197045, 0.663182],
            ],
            [-0.004047, 0.469579, 0.225591, -1.422638],
        ],
    ),
}
"""With ``always_adapt``, and for Lamb without ``max_grad_norm``: weights after three steps."""


def numbers(seed: int) -> dict[str, mx.array]:
    random = np.random.RandomState(seed)
    shapes = {"matrix": (3, 4), "vector": (4,)}
    return {
        name: mx.array(random.standard_normal(shape).astype(np.float32))
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", MADE_BY_TIMM)
def test_weights_are_those_of_timm(name: str) -> None:
    optimizer, expected = MADE_BY_TIMM[name]
    weights = numbers(99)
    for step in range(3):
        weights = optimizer.apply_gradients(numbers(step), weights)
    for weight, known in zip(weights.values(), expected, strict=True):
        assert np.allclose(np.array(weight), known, atol=2e-6)


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_weights_of_zeros_learn(make: type[Optimizer]) -> None:
    weights = {"bias": mx.zeros(3)}
    updated = make(learning_rate=0.1).apply_gradients({"bias": mx.ones(3)}, weights)["bias"]
    assert mx.all(updated < 0).item()
    assert mx.all(mx.isfinite(updated)).item()
