"""Outer steps and aggregates beside their formulas."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from shardmlx.errors import UserError
from shardmlx.islands import aggregate
from shardmlx.islands.aggregate import (
    Aggregate,
    Privacy,
    median,
    squared_norm,
    too_long,
    trimmed_mean,
    weighted_mean,
)
from shardmlx.islands.outer import OuterOptimizer

RANDOM = np.random.default_rng(0)
WEIGHTS, FIRST, SECOND = (RANDOM.standard_normal((5, 7), np.float32) for _ in range(3))


def test_nesterov_is_that_of_torch_in_float32() -> None:
    optimizer = OuterOptimizer.of("nesterov")
    weights, momentum = optimizer.step(WEIGHTS, None, FIRST)
    weights, momentum = optimizer.step(weights, momentum, SECOND)
    buffer, theta = FIRST.astype(np.float64), WEIGHTS.astype(np.float64)
    theta = theta - 0.7 * (FIRST + 0.9 * buffer)
    buffer = 0.9 * buffer + SECOND
    theta = theta - 0.7 * (SECOND + 0.9 * buffer)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, theta, atol=1e-6)
    assert momentum is not None
    np.testing.assert_allclose(momentum, buffer, atol=1e-6)


def test_average_takes_the_mean_of_weights_to_the_bit() -> None:
    weights, momentum = OuterOptimizer.of("average").step(WEIGHTS, None, FIRST)
    assert momentum is None
    np.testing.assert_array_equal(weights, WEIGHTS - FIRST)
    np.testing.assert_array_equal(weights, OuterOptimizer.of("sgd").step(WEIGHTS, None, FIRST)[0])


def test_elastic_is_pulled_by_each_report() -> None:
    weights, _ = OuterOptimizer.of("elastic").step(WEIGHTS, None, FIRST, reports=3)
    np.testing.assert_allclose(weights, WEIGHTS - 0.1 * 3 * FIRST, atol=1e-6)
    assert OuterOptimizer.of("elastic:0.25").elastic == 0.25
    assert OuterOptimizer.of("nesterov").elastic == 1


def test_a_report_three_versions_old_moves_a_quarter() -> None:
    weights, _ = OuterOptimizer.of("sgd").step(WEIGHTS, None, FIRST, staleness=3)
    np.testing.assert_allclose(weights, WEIGHTS - FIRST / 4, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("average:0.5", "sgd:RATE"),
        ("elastic:1.5", "elastic:0.1"),
        ("nesterov:0.7,0.9,1", "nesterov:0.7,0.9"),
        ("sgd:x", "numbers"),
        ("sgd:nan", "sgd:1"),
        ("adam", "nesterov, sgd"),
    ],
)
def test_an_optimizer_that_is_none_is_refused_with_what_to_give(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        OuterOptimizer.of(text)


def test_the_mean_adds_in_order_and_divides_once(tmp_path: Path) -> None:
    arrays = [WEIGHTS, FIRST, SECOND]
    expected = (WEIGHTS * np.float32(2) + FIRST * np.float32(1) + SECOND * np.float32(5)) / (
        np.float32(8)
    )
    np.testing.assert_array_equal(weighted_mean(arrays, [2, 1, 5], tmp_path), expected)
    np.testing.assert_array_equal(WEIGHTS, arrays[0])


@pytest.mark.parametrize("robust", [trimmed_mean, median])
@pytest.mark.parametrize("liar", [1e30, -1e30, 0.0])
def test_one_liar_of_four_moves_a_robust_aggregate_no_further_than_the_honest_lie(
    robust: Aggregate, liar: float, tmp_path: Path
) -> None:
    honest = [np.full(6, value, np.float32) for value in (1.0, 1.5, 2.0)]
    found = robust([*honest, np.full(6, liar, np.float32)], [1] * 4, tmp_path)
    assert found.dtype == np.float32
    assert (found >= 1).all()
    assert (found <= 2).all()


def test_a_trimmed_mean_of_one_or_two_leaves_none_out(tmp_path: Path) -> None:
    np.testing.assert_array_equal(trimmed_mean([FIRST], [1], tmp_path), FIRST)
    both = trimmed_mean([FIRST, SECOND], [1, 1], tmp_path)
    np.testing.assert_array_equal(both, (FIRST + SECOND) / 2)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("size", [1, 35, 1000])
def test_a_rule_of_all_islands_has_the_same_bits_slice_by_slice(
    count: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate, "SLICE_BYTES", 128)
    arrays = [*np.random.default_rng(count).standard_normal((count, size), np.float32)]
    together = np.stack(arrays)
    cut = min(max(1, int(aggregate.TRIMMED * count)), (count - 1) // 2)
    kept = np.sort(together, axis=0)[cut : count - cut]
    assert np.array_equal(median(iter(arrays), [1] * count, tmp_path), np.median(together, axis=0))
    found = trimmed_mean(iter(arrays), [1] * count, tmp_path)
    assert np.array_equal(found, kept.mean(axis=0, dtype=np.float32))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("islands", [2, 32])
def test_a_median_takes_as_much_memory_for_all_numbers_of_islands(
    islands: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = np.ones(1 << 20, np.float32)
    monkeypatch.setattr(aggregate, "SLICE_BYTES", tensor.nbytes // 4)
    tracemalloc.start()
    try:
        median((tensor * np.float32(i) for i in range(islands)), [1] * islands, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 4 * tensor.nbytes


def test_a_norm_far_beyond_others_is_named() -> None:
    assert too_long(5.0, [1.0, 1.2, 9.0], 5) is None
    assert "6.1" in (too_long(6.1, [1.0, 1.2, 9.0], 5) or "")
    assert too_long(1e9, [], 5) is None
    assert too_long(1e9, [1.0], None) is None
    assert too_long(math.nan, [], None) is not None
    assert squared_norm(np.array([3, 4], np.float32)) == 25


def test_clipping_shortens_to_the_norm_and_noise_goes_with_the_reports() -> None:
    privacy = Privacy(clip=2.0, noise=0.5)
    assert (privacy.factor(1.9), privacy.factor(8.0)) == (1.0, 0.25)
    zeros = np.zeros(100_000, np.float32)
    noisy = privacy.noisy(zeros, 10, np.random.default_rng(1))
    assert float(noisy.std()) == pytest.approx(0.5 * 2.0 / 10, rel=0.02)
    assert Privacy().noisy(zeros, 10, np.random.default_rng(1)) is zeros
    with pytest.raises(UserError, match="--clip"):
        Privacy(noise=1.0)


def test_epsilon_is_the_accountants() -> None:
    pytest.importorskip("dp_accounting")
    assert Privacy(clip=1.0, noise=4.0).epsilon(100) == pytest.approx(14.13, abs=0.01)
    assert Privacy().epsilon(100) is None
