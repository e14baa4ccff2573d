"""Faster exponentials on a CPU: the same numbers as MLX's own, and each computed once."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu as of_mlx_lm

from shardmlx.models.runtime.activations import exponential, swiglu
from shardmlx.models.runtime.slice import Slice
from testbed.tiny_models import build, tiny_config

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="a GPU computes them as mlx-lm does"
)


def test_the_exponential_is_exact_to_float32() -> None:
    x = mx.linspace(-80, 80, 4001)
    right = np.exp(np.array(x, dtype=np.float64))
    assert np.abs(np.array(exponential(x)) / right - 1).max() < 1e-5
    assert exponential(mx.array(-mx.inf)).item() == 0


@pytest.mark.parametrize("largest", [3.0, 200.0])
def test_swiglu_and_its_gradients_are_those_of_mlx_lm(largest: float) -> None:
    """Also where the exponential overflows."""
    gate, up, given = (mx.random.normal((2, 9, 33), key=mx.random.key(i)) for i in range(3))
    gate = gate * (largest / mx.abs(gate).max())
    (ours,), mine = mx.vjp(swiglu, [gate, up], [given])
    (theirs,), right = mx.vjp(of_mlx_lm, [gate, up], [given])
    for a, b in zip([ours, *mine], [theirs, *right], strict=True):
        assert mx.abs(a - b).max() <= 1e-6 * mx.abs(b).max()


def test_swiglu_is_mlx_lms_in_16_bits() -> None:
    gate, up = (mx.random.normal((5, 7), mx.bfloat16, key=mx.random.key(i)) for i in range(2))
    assert mx.array_equal(swiglu(gate, up), of_mlx_lm(gate, up))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_slice_calls_it_and_computes_the_same(family: str) -> None:
    """Of MLPs and of experts; and the model's other layers go on as they were."""
    model = build(tiny_config(family, layers=2))
    x = mx.random.normal((1, 8, model.args.hidden_size))
    part, other = Slice(model, 0, 1), Slice(model, 1, 2)
    before, untouched = part(mx.array([[1, 2, 3]])), other(x)
    part.prepare_training(is_selective=False)
    after = part(mx.array([[1, 2, 3]]))
    assert mx.allclose(after, before, rtol=1e-6, atol=1e-6)
    assert mx.array_equal(other(x), untouched)
    changed, plain = ({type(module) for module in layer.modules()} for layer in model.layers)
    assert changed - plain
