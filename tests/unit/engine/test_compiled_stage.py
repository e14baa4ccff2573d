"""Compiled stages: what is fused computes the same, and nothing ahead of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.batches import MicroBatch, make_batch, pack
from shardmlx.engine.stage import Stage
from shardmlx.models.runtime.slice import Slice
from testbed.tiny_models import VOCABULARY
from tests.helpers.models_and_batches import move_trained, saving, tiny_model, with_adapters

LAYERS = 3
SCALE = 1 / 64
WHERE = {"first": (0, 1), "middle": (1, 2), "last": (2, 3)}


def trained(how: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A model of which everything, the adapters of its layers, or nothing is trained."""
    model = tiny_model(layers=LAYERS)
    model.set_dtype(dtype)
    if how in ("lora", "dora"):
        return move_trained(with_adapters(model, dora=how == "dora"))
    return model if how == "full" else model.freeze()


def stage_of(part: Slice, *, compiled: bool = True, savings: Savings = NO_SAVINGS) -> Stage:
    return Stage(
        0,
        part,
        needs_input_gradient=not part.is_first,
        savings=savings,
        compiled=compiled,
    )


def states(microbatch: MicroBatch, part: Slice, seed: int) -> mx.array:
    shape = (*microbatch.shape, part.hidden_size)
    x = mx.random.normal(shape, dtype=part.dtype, key=mx.random.key(seed))
    mx.eval(x)
    return x


def step(
    stage: Stage, microbatches: list[MicroBatch], key: tuple[int, ...] = (0,)
) -> list[np.ndarray]:
    """Outputs and gradients for inputs of ``microbatches``, all in flight at once, and for the
    weights."""
    part, found = stage.part, []
    for j, microbatch in enumerate(microbatches):
        x = None if part.is_first else states(microbatch, part, j)
        found.append(stage.forward(j, microbatch, x, scale=SCALE, key=key))
    for j, microbatch in enumerate(microbatches):
        if not part.is_last:
            stage.fill_cotangent(j, states(microbatch, part, 10 + j))
        if stage.needs_input_gradient:
            found.append(stage.backward_input(j))
        if stage.names:
            stage.backward_weight(j)
    found += [stage.gradients[name] for name in stage.names]
    return [np.array(array.astype(mx.float32)) for array in found]


def batch(seed: int, length: int = 20) -> MicroBatch:
    tokens = np.random.RandomState(seed).randint(1, VOCABULARY, size=(2, length + 1))
    return MicroBatch(tokens.astype(np.int32), np.array([[0, length + 1]] * 2, np.int32), 0)


BATCHES = [batch(0), batch(1), batch(2, length=9), batch(3)]


@pytest.mark.parametrize(
    ("where", "how", "checkpoint", "dtype"),
    [
        *((where, "full", False, mx.float32) for where in WHERE),
        *((where, "lora", True, mx.bfloat16) for where in WHERE),
        ("middle", "dora", False, mx.float32),
        ("middle", "full", True, mx.float32),
        ("last", "full", False, mx.bfloat16),
    ],
    ids=str,
)
def test_the_same_to_the_bit_as_uncompiled(
    where: str, how: str, checkpoint: bool, dtype: mx.Dtype
) -> None:
    part = Slice(trained(how, dtype), *WHERE[where])
    expected = step(stage_of(part, compiled=False, savings=saving(checkpoint)), BATCHES)
    found = step(stage_of(part, savings=saving(checkpoint)), BATCHES)
    assert all(np.isfinite(array).all() and array.any() for array in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("how", ["full", "lora"])
@pytest.mark.parametrize("where", WHERE)
def test_pieces_are_compiled_too(where: str, how: str) -> None:
    part = Slice(trained(how, mx.float32), *WHERE[where])
    pieces = Savings(attention_chunk=8, loss_chunk=8)
    expected = step(stage_of(part, compiled=False), BATCHES)
    found = step(stage_of(part, savings=pieces), BATCHES)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


class _Exponential(Slice):
    """A slice whose output is part of its own gradient: exp' = exp."""

    def __call__(self, x: mx.array, **how: Any) -> mx.array:
        return mx.exp(super().__call__(x, **how) / 10)


def test_nothing_is_computed_from_a_gradient_that_is_yet_to_come() -> None:
    microbatches = [batch(0), batch(1)]
    part = _Exponential(trained("nothing"), 1, 2)
    expected = step(stage_of(part, compiled=False), microbatches)
    for ours, theirs in zip(step(stage_of(part), microbatches), expected, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-6)  # not NaN, which waits in its place


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs for which Python has called a slice's layers."""
    shapes: list[tuple[int, ...]] = []
    call = Slice.__call__

    def counted(part: Slice, x: mx.array, **how: Any) -> mx.array:
        shapes.append(x.shape)
        return call(part, x, **how)

    monkeypatch.setattr(Slice, "__call__", counted)
    return shapes


def test_a_graph_is_traced_once_for_each_shape(traces: list[tuple[int, ...]]) -> None:
    step(stage_of(Slice(trained("lora"), 1, 2)), BATCHES)
    assert [length for _, length, _ in traces] == [20, 9]


def test_a_graph_takes_the_weights_as_they_are() -> None:
    stage = stage_of(Slice(trained("lora"), 1, 2))
    step(stage, [batch(0)])
    for name in stage.names:
        stage.part[name] = stage.part[name] * 2
    stage.gradients.clear()
    expected = step(stage_of(stage.part, compiled=False), [batch(0)])
    for ours, theirs in zip(step(stage, [batch(0)]), expected, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_masks_of_dropout_are_an_input_of_the_graph(
    where: str, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same units are dropped as in stages that are not compiled, and one graph is traced."""
    model = move_trained(with_adapters(tiny_model(layers=LAYERS), dropout=0.5))
    part = Slice(model, *WHERE[where])
    batches = [MicroBatch(batch(0).tokens, batch(0).spans, first_row) for first_row in (0, 2)]
    plain = stage_of(part, compiled=False, savings=saving(checkpoint))
    expected = [step(plain, batches, key=(7, number)) for number in range(2)]
    traced = [0]
    call = Slice.__call__

    def counted(part: Slice, x: mx.array, **how: Any) -> mx.array:
        traced[0] += 1
        return call(part, x, **how)

    monkeypatch.setattr(Slice, "__call__", counted)
    stage = stage_of(part, savings=saving(checkpoint))
    found = [step(stage, batches, key=(7, number)) for number in range(2)]
    assert traced == [1]
    assert not np.array_equal(found[0][0], found[1][0])
    for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


LENGTHS = [(5, 20, 9), (3, 3, 20, 9), (12, 11, 10), (52, 9)]
"""Of the sequences of packed micro-batches, which take from 33 to 64 positions."""


def packed(seed: int, lengths: Sequence[int]) -> MicroBatch:
    random = np.random.RandomState(seed)
    samples = [(random.randint(1, VOCABULARY, size=length + 1), 0) for length in lengths]
    (whole,) = pack(make_batch(samples, 2048), 1)
    return whole


PACKED = [packed(seed, lengths) for seed, lengths in enumerate(LENGTHS)]


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.isfinite(ours).all()
        assert np.allclose(ours, theirs, rtol=1e-5, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("where", "how", "savings"),
    [
        ("first", "lora", NO_SAVINGS),
        ("middle", "full", Savings(attention_chunk=16)),
        ("last", "lora", Savings(recompute="full", attention_chunk=16)),
        ("last", "full", NO_SAVINGS),
    ],
    ids=str,
)
def test_packed_rows_share_a_graph_of_their_next_length(
    where: str, savings: Savings, how: str, traces: list[tuple[int, ...]]
) -> None:
    part = Slice(trained(how), *WHERE[where])
    expected = step(stage_of(part, compiled=False, savings=savings), PACKED)
    traces.clear()
    stage = stage_of(part, savings=savings)
    found = step(stage, PACKED)
    assert {shape[1] for shape in traces} == {64}
    # With pieces there is one for each power of two up to which a sequence reaches.
    graphs = 3 if savings.attention_chunk else 1
    assert len(traces) == graphs
    assert_close(found, expected)
    stage.gradients.clear()
    step(stage, PACKED[::-1])
    assert len(traces) == graphs


def test_rows_of_more_lengths_than_a_run_has_widths_are_not_compiled(
    traces: list[tuple[int, ...]],
) -> None:
    """Each graph stays in memory."""
    part = Slice(trained("lora"), 1, 2)
    stage = stage_of(part)
    stage.most_graphs = 2
    rows = [packed(0, [length]) for length in (20, 50, 80)]
    for _ in range(2):
        for j, microbatch in enumerate(rows):
            stage.forward(j, microbatch, states(microbatch, part, 0), scale=SCALE)
    assert [shape[1] for shape in traces] == [32, 64, 81, 81]


def test_packed_rows_with_dropout_share_a_graph(traces: list[tuple[int, ...]]) -> None:
    model = move_trained(with_adapters(tiny_model(layers=LAYERS), dropout=0.5))
    part = Slice(model, *WHERE["first"])
    expected = [step(stage_of(part, compiled=False), PACKED, key=(7, n)) for n in range(2)]
    traces.clear()
    stage = stage_of(part)
    found = []
    for number in range(2):
        stage.gradients.clear()
        found.append(step(stage, PACKED, key=(7, number)))
    assert len(traces) == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


def test_a_head_without_dropout_is_compiled_whatever_layers_drop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = move_trained(with_adapters(tiny_model(layers=LAYERS), dropout=0.5))
    part = Slice(model, *WHERE["last"])
    pieces = Savings(loss_chunk=8, counted_only=True)
    expected = step(stage_of(part, compiled=False, savings=pieces), PACKED, key=(7,))
    traced = [0]
    logits = Slice.logits

    def counted(part: Slice, x: mx.array, **how: Any) -> mx.array:
        traced[0] += 1
        return logits(part, x, **how)

    monkeypatch.setattr(Slice, "logits", counted)
    stage = stage_of(part, savings=pieces)
    found = step(stage, PACKED, key=(7,))
    once = traced[0]
    stage.gradients.clear()
    step(stage, PACKED, key=(8,))
    assert traced[0] == once < 2 * len(PACKED)
    assert_close(found, expected)


def test_masks_of_dropout_are_drawn_for_each_micro_batch() -> None:
    model = move_trained(with_adapters(tiny_model(layers=LAYERS), dropout=0.5))
    stage = stage_of(Slice(model, 0, 1))
    first, again, other = (
        stage.forward(j, batch(0), None, scale=SCALE, key=(key,)) for j, key in enumerate((1, 1, 2))
    )
    assert mx.array_equal(first, again)
    assert not mx.array_equal(first, other)
