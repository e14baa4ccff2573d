"""What islands send instead of all numbers of a difference."""

from __future__ import annotations

import numpy as np
import pytest

from shardmlx.islands.encodings import ENCODINGS, encoding_named

SHAPES = [(64, 48), (3, 32, 16), (7,), (1, 5), ()]
NUMBER = {"top-k": ":0.1", "low-rank": ":2"}
ALL = [f"{name}{NUMBER.get(name, '')}" for name in ENCODINGS]


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.RandomState(seed).randn(*shape), np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_the_bytes_of_a_tensor_follow_from_its_shape(name: str, shape: tuple[int, ...]) -> None:
    encoding = encoding_named(name)
    for array in (random(shape), np.zeros(shape, np.float32)):
        data = encoding.encode(array)
        assert (data.dtype.name, data.nbytes) == ("uint8", encoding.nbytes(shape))
        # As they come from a socket.
        came = encoding.decode(np.frombuffer(data.tobytes(), np.uint8), shape)
        assert (came.dtype.name, came.shape) == ("float32", shape)
        if not (array.any() and encoding.is_lossy):
            np.testing.assert_array_equal(came, array)
    for wrong in (data[:-1], np.append(data, data[:1])):
        with pytest.raises(ValueError, match=f"^{len(wrong)} bytes .* {len(data)}"):
            encoding.decode(wrong, shape)


def test_a_matrix_of_4096_x_4096_takes_so_many_bytes() -> None:
    sizes = {name: encoding_named(name).nbytes((4096, 4096)) for name in ENCODINGS}
    assert sizes == {
        "float32": 2**26,
        "bfloat16": 2**25,
        "int8": 2**24 + 4 * 2**16,
        "top-k": 8 * 167773,
        "low-rank": 4 * 4 * 8192,
    }


def test_top_k_keeps_the_largest_numbers_as_they_are() -> None:
    array = random((20, 10))
    came = encoding_named("top-k:0.1").decode(encoding_named("top-k:0.1").encode(array), (20, 10))
    largest = np.argsort(np.abs(array.reshape(-1)))[-20:]
    assert {*np.flatnonzero(came)} == {*largest}
    np.testing.assert_array_equal(came.reshape(-1)[largest], array.reshape(-1)[largest])


def test_top_k_writes_nowhere_else_than_in_the_tensor() -> None:
    encoding = encoding_named("top-k:0.5")
    data = encoding.encode(random((4,)))
    data[:8] = np.array([3, 4], np.uint32).view(np.uint8)
    with pytest.raises(ValueError, match="at 4 of a tensor of 4"):
        encoding.decode(data, (4,))


def test_low_rank_finds_a_matrix_of_that_rank_at_once_and_a_fixed_one_step_by_step() -> None:
    encoding = encoding_named("low-rank:2")
    low = random((30, 2)) @ random((2, 20), 1)
    np.testing.assert_allclose(encoding.decode(encoding.encode(low), (30, 20)), low, atol=1e-4)
    array, before, off = random((30, 20)), None, []
    for _ in range(30):
        before = encoding.encode(array, before)
        off.append(np.linalg.norm(encoding.decode(before, (30, 20)) - array))
    best = np.sqrt((np.linalg.svd(array)[1][2:] ** 2).sum())
    assert off[0] > 1.02 * best
    assert off[-1] == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("name", ALL)
def test_a_number_that_is_not_finite_is_seen_by_who_decodes(name: str) -> None:
    encoding = encoding_named(name)
    for number in (np.nan, np.inf):
        array = random((24, 16))
        array[3, 4] = number
        assert not np.isfinite(encoding.decode(encoding.encode(array), (24, 16))).all()


@pytest.mark.parametrize(
    "name", ["int4", "int8:2", "top-k:0.6", "top-k:0", "top-k:x", "low-rank:1.5", "low-rank:"]
)
def test_an_unknown_encoding_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"give|choose from float32, bfloat16, int8, top-k"):
        encoding_named(name)
