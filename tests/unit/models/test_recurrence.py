"""Recurrent layers piece by piece: the numbers of mlx-lm's own functions, in less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import ssm_update

from shardmlx.models.runtime.recurrence import (
    gated_delta_by_pieces,
    ssm_by_pieces,
    use_chunks,
    use_pieces,
)
from shardmlx.models.sizes.layer_shape import PIECE
from testbed.further_configs import FURTHER
from testbed.tiny_models import build
from testbed.undeclared_configs import UNDECLARED

Function = Callable[..., tuple[mx.array, mx.array]]
HEADS, KEY, VALUE = 4, 16, 8


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def gated_delta(length: int, is_decay_by_key: bool = False) -> list[mx.array]:
    """Return queries, keys, values, decays, rates and a first state of two rows."""
    decay = (2, length, HEADS, KEY) if is_decay_by_key else (2, length, HEADS)
    return [
        random(2, length, HEADS // 2, KEY) / 4,
        random(2, length, HEADS // 2, KEY) / 4,
        random(2, length, HEADS, VALUE),
        mx.random.uniform(0.5, 1.0, decay),
        mx.random.uniform(0.0, 1.0, (2, length, HEADS)),
        random(2, HEADS, VALUE, KEY),
    ]


def state_space(length: int) -> list[mx.array]:
    """Return the seven arrays of a state space without a first state."""
    return [
        random(2, length, HEADS, VALUE),
        random(HEADS) / 4,
        random(2, length, 1, KEY) / 4,
        random(2, length, 1, KEY) / 4,
        random(HEADS),
        random(2, length, HEADS),
        random(HEADS),
    ]


def with_gradients(function: Function, arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return both results of a function, and the gradients of their weighted sum."""
    results = [*function(*arrays)]
    weights = [mx.cos(mx.arange(each.size)).reshape(each.shape) for each in results]
    _, gradients = mx.vjp(lambda *of: [*function(*of)], [*arrays], weights)
    return [*results, *gradients]


def largest_difference(a: Sequence[mx.array], b: Sequence[mx.array]) -> float:
    return max(float(mx.abs(x - y).max() / mx.abs(x).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("length", [1, PIECE - 1, PIECE, 2 * PIECE + 5])
@pytest.mark.parametrize("is_decay_by_key", [False, True])
def test_gated_delta_rules_have_the_same_numbers(length: int, is_decay_by_key: bool) -> None:
    arrays = gated_delta(length, is_decay_by_key)
    expected = with_gradients(gated_delta_ops, arrays)
    assert largest_difference(expected, with_gradients(gated_delta_by_pieces, arrays)) < 1e-6


@pytest.mark.parametrize("length", [1, PIECE, 2 * PIECE + 5, 5 * PIECE])
def test_state_spaces_have_the_same_numbers(length: int) -> None:
    arrays = state_space(length)
    expected = with_gradients(ssm_update, arrays)
    assert largest_difference(expected, with_gradients(ssm_by_pieces, arrays)) < 1e-5


def test_with_a_mask_mlx_lm_computes() -> None:
    arrays, mask = gated_delta(9), mx.arange(9)[None] < mx.array([[9], [4]])
    q, k, v, g, beta, state = arrays
    found = gated_delta_by_pieces(q, k, v, g, beta, state, mask)
    assert all(map(mx.array_equal, gated_delta_ops(q, k, v, g, beta, state, mask), found))


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba2"])
def test_a_layer_changes_once_however_many_stages_are_cut(kind: str) -> None:
    (layer, *_) = build(UNDECLARED[kind]).layers
    use_pieces(layer)
    classes = [type(module) for module in layer.modules()]
    use_pieces(layer)
    assert [type(module) for module in layer.modules()] == classes


def test_linear_attention_in_chunks_has_the_gradients_of_a_loop() -> None:
    """A row of more tokens than a chunk of mlx-lm's, in the layer whose states decay fastest."""
    (layer, *_) = build(FURTHER["bailing_moe_linear"]).layers
    x = random(2, 300, 32)

    def gradients() -> list[mx.array]:
        _, found = mx.vjp(layer, [x], [mx.cos(mx.arange(x.size)).reshape(x.shape)])
        return [layer(x), *found]

    expected = gradients()
    use_chunks(layer)
    found = gradients()
    assert not mx.array_equal(found[0], expected[0])
    assert largest_difference(expected, found) < 2e-5


def peak(function: Function, arrays: Sequence[mx.array]) -> int:
    mx.eval([*arrays])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(with_gradients(function, arrays))
    return mx.get_peak_memory() - before


@pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="MLX's kernel computes there")
def test_memory_hardly_grows_with_the_length() -> None:
    short, long = gated_delta(128), gated_delta(512)
    assert peak(gated_delta_by_pieces, long) <= 0.15 * peak(gated_delta_ops, long)
    assert peak(gated_delta_by_pieces, long) <= 2 * peak(gated_delta_by_pieces, short)
    of_states = state_space(1024)
    assert peak(ssm_by_pieces, of_states) <= 0.3 * peak(ssm_update, of_states)
