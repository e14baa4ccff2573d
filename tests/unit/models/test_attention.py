"""Attention in pieces is attention: outputs, gradients, windows, packed rows; and takes less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.models.runtime.attention import ChunkedMask, attend, attention_in_pieces
from shardmlx.models.runtime.packed_positions import PackedPositions
from shardmlx.models.runtime.traced_positions import TracedPositions
from shardmlx.models.sizes.layer_shape import fuses_attention

LENGTH, HEADS, GROUPS, WIDTH = 67, 6, 2, 8
SCALE = 0.3


def arrays(
    length: int = LENGTH, dtype: mx.Dtype = mx.float32, rows: int = 2, width: int = WIDTH
) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(3), 4)
    shapes = [(rows, heads, length, width) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [
        mx.random.normal(shape, key=key).astype(dtype)
        for shape, key in zip(shapes, keys, strict=True)
    ]


def packed(*lengths: int) -> PackedPositions:
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return PackedPositions(rows, np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]))


def whole(chunked: ChunkedMask) -> Callable[..., mx.array]:
    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        length = q.shape[2]
        places = chunked.places or packed(length)
        mask = mx.array(places.mask(chunked.window))
        out: mx.array = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask)
        return out

    return attend


def in_pieces(chunked: ChunkedMask) -> Callable[..., mx.array]:
    return lambda q, k, v: attention_in_pieces(q, k, v, SCALE, chunked)


def results(attend: Callable[..., mx.array], given: list[mx.array]) -> list[mx.array]:
    *primals, cotangent = given
    outputs, gradients = mx.vjp(attend, primals, [cotangent])
    mx.eval(outputs, gradients)
    return [*outputs, *gradients]


def difference(ours: mx.array, theirs: mx.array) -> float:
    """The largest, relative to the largest entry."""
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    return float(np.array(mx.abs(ours - theirs).max() / mx.maximum(mx.abs(theirs).max(), 1)))


def assert_alike(ours: list[mx.array], theirs: list[mx.array]) -> None:
    """Equal but for rounding, relative to the largest entry of all.

    The gradient of queries is a difference of numbers as large as the other gradients. With a
    window of one it is 0, of which each processor rounds another rest. Up to 1.1e-6 was measured.
    """
    size = max(float(np.array(mx.abs(each).max())) for each in theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert float(np.array(mx.abs(mine - other).max())) < 2e-6 * size


@pytest.mark.parametrize("chunk", [1, 16, 500])
@pytest.mark.parametrize("window", [None, 1, 16])
@pytest.mark.parametrize("lengths", [None, (1, 66), (20, 1, 30, 16)])
def test_output_and_gradients_are_those_of_the_whole(
    lengths: tuple[int, ...] | None, window: int | None, chunk: int
) -> None:
    chunked = ChunkedMask(chunk, window, None if lengths is None else packed(*lengths))
    given = arrays(rows=2 if lengths is None else 1)
    assert_alike(results(in_pieces(chunked), given), results(whole(chunked), given))


@pytest.mark.parametrize("chunk", [7, 16, 500])
@pytest.mark.parametrize("window", [None, 1, 16])
@pytest.mark.parametrize("lengths", [(1, 61), (20, 1, 30, 5)])
def test_sequences_whose_places_are_arrays_of_a_graph_see_the_same_keys(
    lengths: tuple[int, ...], window: int | None, chunk: int
) -> None:
    """The row has grown by some positions at its end, whose results nobody uses."""
    places = packed(*lengths)
    given = arrays()
    length = len(places.rows)
    is_used = mx.arange(given[0].shape[2])[:, None] < length
    given[-1] = mx.where(is_used, given[-1], 0)
    traced = TracedPositions.of(places, given[0].shape[2], chunk)
    found = results(in_pieces(ChunkedMask(chunk, window, traced)), given)
    assert all(mx.isfinite(each).all() for each in found)
    expected = results(
        whole(ChunkedMask(chunk, window, places)), [each[:, :, :length] for each in given]
    )
    assert_alike([each[:, :, :length] for each in found], expected)
    assert np.array_equal(np.array(traced.mask(window))[:length, :length], places.mask(window))


@pytest.mark.parametrize("chunk", [1, 16, 67])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_a_score_more_for_each_head(window: int | None, chunk: int) -> None:
    """Of a size that decides much, and little; MLX's own kernel says the same of the output."""
    chunked = ChunkedMask(chunk, window)
    *given, cotangent = arrays()
    sinks = mx.linspace(-3, 6, HEADS)
    mask = mx.array(packed(LENGTH).mask(window))

    def whole_with(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> mx.array:
        keys = mx.repeat(k, HEADS // GROUPS, axis=1)
        scores = mx.where(mask, SCALE * q @ keys.swapaxes(-1, -2), -mx.inf)
        column = mx.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        shares = mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
        out: mx.array = shares @ mx.repeat(v, HEADS // GROUPS, axis=1)
        return out

    def pieces_with(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> mx.array:
        return attention_in_pieces(q, k, v, SCALE, chunked, sinks)

    ours = results(pieces_with, [*given, sinks, cotangent])
    theirs = results(whole_with, [*given, sinks, cotangent])
    assert ours[-1].shape == (HEADS,)
    assert mx.abs(ours[-1]).min() > 1e-3
    assert_alike(ours, theirs)
    q, k, v = given
    kernel = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask, sinks=sinks)
    assert difference(ours[0], kernel) < 1e-6


def attending(mask: ChunkedMask, sinks: mx.array | None = None) -> Callable[..., mx.array]:
    return lambda q, k, v: attend(q, k, v, None, SCALE, mask, sinks)


def same_bits(ours: list[mx.array], theirs: list[mx.array]) -> bool:
    return all(mx.array_equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("window", [None, LENGTH])
def test_a_device_that_fuses_attention_gets_plain_causal_rows_whole(window: int | None) -> None:
    given = arrays(width=64)
    fused = results(attending(ChunkedMask(16, window, fuses=True)), given)
    pieces = results(attending(ChunkedMask(16, window)), given)
    assert_alike(fused, pieces)
    assert not same_bits(fused, pieces)
    plain = partial(mx.fast.scaled_dot_product_attention, scale=SCALE, mask="causal")
    assert same_bits(fused, results(plain, given))


@pytest.mark.parametrize(
    ("width", "window", "lengths", "sinks"),
    [
        (8, None, None, None),
        (64, LENGTH - 1, None, None),
        (64, None, (20, 47), None),
        (64, None, None, mx.zeros(HEADS)),
    ],
    ids=["a width without a kernel", "a window", "a packed row", "sinks"],
)
def test_other_rows_are_in_pieces_there_too(
    width: int, window: int | None, lengths: tuple[int, ...] | None, sinks: mx.array | None
) -> None:
    given = arrays(rows=1, width=width)
    places = None if lengths is None else packed(*lengths)
    ours, theirs = (
        results(attending(ChunkedMask(16, window, places, fuses), sinks), given)
        for fuses in (True, False)
    )
    assert same_bits(ours, theirs)


def test_attention_is_fused_for_heads_of_some_widths_whatever_the_length() -> None:
    def fuses(keys: int, values: int, window: int | None = None) -> bool:
        return fuses_attention(2048, window, (keys, values), is_packed=False, has_sinks=False)

    assert all(fuses(width, width) for width in (64, 80, 96, 128, 192, 256))
    assert fuses(96, 64)
    assert not fuses(192, 128)
    assert not fuses(32, 32)
    assert [fuses(64, 64, window=window) for window in (2047, 2048)] == [False, True]


def test_half_precision_is_as_near_as_mlx_itself() -> None:
    """Both round; neither is farther from the float32 result than rounding accounts for."""
    chunked = ChunkedMask(16)
    exact = results(whole(chunked), [each.astype(mx.float32) for each in arrays(dtype=mx.bfloat16)])
    ours = results(in_pieces(chunked), arrays(dtype=mx.bfloat16))
    theirs = results(whole(chunked), arrays(dtype=mx.bfloat16))
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == mx.bfloat16
        assert difference(mine, right) < max(2 * difference(other, right), 1e-2)


def test_scores_of_any_size_overflow_nothing() -> None:
    *given, cotangent = arrays()
    given = [*(1e4 * each for each in given), cotangent]
    out, *gradients = results(in_pieces(ChunkedMask(16)), given)
    assert difference(out, results(whole(ChunkedMask(16)), given)[0]) < 1e-3
    assert all(mx.isfinite(each).all() for each in gradients)


def test_one_piece_has_its_scores_in_memory() -> None:
    """At most three and a half arrays of heads x chunk x T, beside what goes in and comes out."""
    length, chunk = 1024, 32
    given = arrays(length, rows=1)
    mx.eval(given)
    given_bytes = sum(each.nbytes for each in given)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    results(in_pieces(ChunkedMask(chunk)), given)
    peak = mx.get_peak_memory() - before
    scores = HEADS * chunk * length * 4
    # Outputs, scaled queries, their parts, and the sums of two gradients: small beside the scores.
    assert peak <= 3.5 * scores + 6 * given_bytes
    assert peak < 0.5 * HEADS * length**2 * 4


def test_keys_that_nobody_sees_are_not_looked_at() -> None:
    """NaN there would be seen: a window's old keys, and other sequences."""
    q, k, v, _ = arrays(rows=1)
    k[:, :, :20] = mx.nan
    v[:, :, :20] = mx.nan
    for chunked in (ChunkedMask(8, window=4), ChunkedMask(8, places=packed(20, 47))):
        out = attention_in_pieces(q, k, v, SCALE, chunked)
        assert mx.isfinite(out[:, :, 24:]).all()
