"""Numbers as they travel in shorter types."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.distributed.wire_formats import BFloat16, Int8


def there_and_back(wire: BFloat16 | Int8, numbers: np.ndarray) -> np.ndarray:
    data = wire.encode(numbers)
    assert (data.dtype.name, data.nbytes) == ("uint8", wire.nbytes(numbers.size))
    return wire.decode(data, numbers.size)


def test_bfloat16_rounds_as_mlx_does() -> None:
    numbers = np.random.RandomState(0).randn(5000).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38, 1e-45], np.float32)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    for given in (numbers, ties, special):
        rounded = np.array(mx.array(given).astype(mx.bfloat16).astype(mx.float32))
        np.testing.assert_array_equal(there_and_back(BFloat16(), given), rounded)


def test_in_int8_256_numbers_share_a_scale() -> None:
    numbers = np.ones(600, np.float32)
    numbers[0] = 1000.0
    came = there_and_back(Int8(), numbers)
    assert Int8().nbytes(600) == 600 + 3 * 4
    assert came[0] == pytest.approx(1000.0)
    assert (came[1:256] == 0).all(), "beside it they are less than half of a 127th"
    assert came[256:] == pytest.approx(1.0)


def test_in_int8_no_number_is_off_by_more_than_half_of_a_127th_of_the_largest() -> None:
    numbers = np.random.RandomState(1).randn(256 * 20 + 7).astype(np.float32)
    off = np.abs(there_and_back(Int8(), numbers) - numbers)
    for start in range(0, numbers.size, 256):
        block = slice(start, start + 256)
        assert off[block].max() <= np.abs(numbers[block]).max() / 254 * (1 + 1e-6)


def test_in_int8_what_is_not_finite_spoils_its_block_alone() -> None:
    numbers = np.ones(512, np.float32)
    numbers[3] = np.inf
    came = there_and_back(Int8(), numbers)
    assert np.isnan(came[:256]).all()
    assert came[256:] == pytest.approx(1.0)
