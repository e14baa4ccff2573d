"""How far a device is from the CPU: the self-test of ``shardmlx doctor``."""

import math

import numpy as np
import pytest

from shardmlx.hosts import self_test


def test_a_difference_is_relative_to_the_largest_entry() -> None:
    expected = np.array([0.5, -4.0])
    assert self_test._apart(expected + 0.25, expected) == 0.0625
    assert math.isnan(self_test._apart(np.array([math.nan, 0.0]), expected))
    assert self_test._apart(np.zeros(2), np.zeros(2)) == 0
    assert self_test._apart(np.ones(2), np.zeros(2)) == 1


def test_what_the_device_computes_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = [{"loss": np.ones(1), "w": np.array([2.0, 1.0])}, {"loss": np.ones(1), "w": np.ones(2)}]
    monkeypatch.setattr(self_test, "_loss_and_gradients", lambda model: rest.pop(0))
    assert self_test._difference(self_test.KINDS["attention"]) == 0.5
