"""Exact attention in pieces of queries, with the scores of one piece in memory at a time.

The forward keeps queries, keys, values, the output, and the log-sum-exp of each query's scores. The
backward computes a piece's probabilities again, and adds its part to the gradients of keys and
values (Rabe & Staats, arXiv:2112.05682; Dao et al., arXiv:2205.14135, algorithm 4)::

    keys     start ------- first ---- edge ------------- s ======= e
             other         not seen   seen by some of    seen by   causal
             sequences     (window)   the piece          all

    queries of the piece: s to e; of a row that holds several sequences, all of one

Keys that no query of the piece sees are left out, so long texts take half the arithmetic. On Metal
MLX has the same for plain causal rows, which ``attend`` leaves to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from shardmlx.models.runtime.activations import Arrays, exponential, with_gradient
from shardmlx.models.runtime.traced_positions import Places, TracedPositions
from shardmlx.models.sizes.layer_shape import fuses_attention


@dataclass(frozen=True, slots=True)
class ChunkedMask:
    """A layer's mask for attention in pieces: the keys that positions of a micro-batch see.

    Each position sees itself and those before it in its sequence, or only the last ``window`` of
    these. ``chunk`` is the most queries of a piece, from 1. ``fuses`` says whether the device holds
    no scores where MLX's own attention takes the place of pieces. Where sequences share prefixes,
    ``places`` have them all, and ``taken`` are the indices of ``PackedPositions.whole``.
    """

    chunk: int
    window: int | None = None
    places: Places | None = None
    fuses: bool = False
    taken: tuple[mx.array, mx.array] | None = None

    def pieces(self, length: int) -> Iterator[QueryChunk]:
        """Yield the pieces of a row of ``length`` in order."""
        if isinstance(self.places, TracedPositions):
            # Sequences may begin anywhere: a piece sees as many keys as the longest has.
            for s in range(0, length, self.chunk):
                start = max(0, s - self.places.longest + 1)
                e = min(length, s + self.chunk)
                yield QueryChunk(start, s, e, self.window, self.places)
            return
        starts = [0]
        if self.places is not None:
            starts += (np.flatnonzero(np.diff(self.places.rows)) + 1).tolist()
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            for s in range(start, stop, self.chunk):
                yield QueryChunk(start, s, min(stop, s + self.chunk), self.window)


class QueryChunk(NamedTuple):
    """Queries ``s`` to ``e`` of the sequence that begins at ``start``, or of several: none of them
    sees a key before ``start``, and ``places`` say the others."""

    start: int
    s: int
    e: int
    window: int | None = None
    places: TracedPositions | None = None

    def segments(self) -> list[tuple[int, int, mx.array | None]]:
        """Return keys from, to, and which of them each query sees, (queries, keys), if not all."""
        edges = {self.start, self.s, self.e}
        if self.window is not None:
            first = max(self.start, self.s - self.window + 1)
            edges = {edge for edge in (*edges, first, self.e - self.window) if first <= edge}
        ordered = sorted(edges)
        return [(a, b, self._seen(a, b)) for a, b in pairwise(ordered)]

    def _seen(self, a: int, b: int) -> mx.array | None:
        if self.places is not None:
            return self.places.seen(slice(self.s, self.e), slice(a, b), self.window)
        first = 0 if self.window is None else self.e - self.window  # that all queries see
        if b <= self.s and first <= a:
            return None
        queries = mx.arange(self.s, self.e)[:, None]
        keys = mx.arange(a, b)
        seen = queries >= keys
        return seen if self.window is None else seen & (keys > queries - self.window)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return mlx-lm's ``scaled_dot_product_attention``, in pieces for a ``ChunkedMask`` unless the
    device fuses it."""
    if isinstance(mask, ChunkedMask):
        if mask.taken is not None:
            sources, own = mask.taken
            q, k, v = (each[:, :, sources] for each in (queries, keys, values))
            return attention_in_pieces(q, k, v, scale, mask, sinks)[:, :, own]
        is_fused = mask.fuses and fuses_attention(
            queries.shape[2],
            mask.window,
            (keys.shape[-1], values.shape[-1]),
            is_packed=mask.places is not None,
            has_sinks=sinks is not None,
        )
        if not is_fused:
            return attention_in_pieces(queries, keys, values, scale, mask, sinks)
        mask = "causal"
    out: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return out


def attention_in_pieces(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: ChunkedMask,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return attention (rows, heads, T, Dv) of queries (rows, heads, T, D), keys (rows, groups, T,
    D) and values (rows, groups, T, Dv), as MLX's ``scaled_dot_product_attention``.

    ``sinks`` (heads,) add a score to each head, for a key whose value is 0.
    """
    pieces = [*mask.pieces(queries.shape[2])]
    attention = with_gradient(partial(_forward, pieces), partial(_backward, pieces))
    rows, heads, length, _ = queries.shape
    groups = keys.shape[1]
    grouped = (queries * scale).reshape(rows, groups, heads // groups, length, -1)
    out: mx.array
    out, sums = (each.reshape(rows, heads, length, -1) for each in attention(grouped, keys, values))
    if sinks is None:
        return out
    # The share of the scores' sum that the sink leaves to the keys.
    shares = mx.sigmoid(sums - sinks.astype(mx.float32)[:, None, None])
    weighted: mx.array = (out * shares).astype(out.dtype)
    return weighted


def _forward(
    pieces: Sequence[QueryChunk], q: mx.array, k: mx.array, v: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the output, as ``q`` (rows, groups, heads of a group, T, D), and the log-sum-exp."""
    outs: list[mx.array] = []
    sums: list[mx.array] = []
    for piece in pieces:
        (mine,) = mx.depends([_flat(q, piece)], outs[-1:])
        segments = piece.segments()
        scores = [_scores(mine, k[:, :, a:b], seen) for a, b, seen in segments]
        most = reduce(mx.maximum, [each.max(axis=-1, keepdims=True) for each in scores])
        weights = [exponential(each - most) for each in scores]
        total = reduce(mx.add, [each.sum(axis=-1, keepdims=True) for each in weights])
        spans = zip(weights, segments, strict=True)
        out = reduce(mx.add, [each.astype(v.dtype) @ v[:, :, a:b] for each, (a, b, _) in spans])
        outs.append(_by_head((out / total).astype(v.dtype), q))
        sums.append(_by_head(most + mx.log(total), q))
    return mx.concatenate(outs, axis=3), mx.concatenate(sums, axis=3)


def _backward(
    pieces: Sequence[QueryChunk], primals: Arrays, cotangents: Arrays, outputs: Arrays
) -> tuple[mx.array, mx.array, mx.array]:
    """Return gradients of queries, keys and values, given those of output and log-sum-exp."""
    (q, k, v), (out, sums), (gradient, of_sums) = primals, outputs, cotangents
    inner = (out * gradient).astype(mx.float32).sum(axis=-1, keepdims=True) - of_sums
    of_q: list[mx.array] = []
    of_k = k[:, :, :0]
    of_v = v[:, :, :0]
    for piece in pieces:
        mine, down = mx.depends([_flat(q, piece), _flat(gradient, piece)], [*of_q[-1:], of_k, of_v])
        parts = []
        for a, b, seen in piece.segments():
            keys = k[:, :, a:b]
            weights = exponential(_scores(mine, keys, seen) - _flat(sums, piece))
            slopes = down @ v[:, :, a:b].swapaxes(-1, -2)
            slopes = (weights * (slopes - _flat(inner, piece))).astype(q.dtype)
            parts.append(slopes @ keys)
            of_k = _added(of_k, a, b, slopes.swapaxes(-1, -2) @ mine)
            of_v = _added(of_v, a, b, weights.astype(v.dtype).swapaxes(-1, -2) @ down)
        of_q.append(_by_head(reduce(mx.add, parts), q))
    return mx.concatenate(of_q, axis=3), of_k, of_v


def _scores(q: mx.array, k: mx.array, seen: mx.array | None) -> mx.array:
    """Return float32 scores (rows, groups, queries, keys), -inf where a key is not seen."""
    scores: mx.array = (q @ k.swapaxes(-1, -2)).astype(mx.float32)
    if seen is None:
        return scores
    by_head = scores.reshape(*scores.shape[:2], -1, *seen.shape)
    return mx.where(seen, by_head, -mx.inf).reshape(scores.shape)


def _flat(x: mx.array, piece: QueryChunk) -> mx.array:
    """Return a piece of all heads of a group, one after the other: (rows, groups, queries, D)."""
    return x[:, :, :, piece.s : piece.e].flatten(2, 3)


def _by_head(x: mx.array, like: mx.array) -> mx.array:
    """Return the result of ``_flat``, divided by heads again."""
    rows, groups, heads = like.shape[:3]
    return x.reshape(rows, groups, heads, -1, x.shape[-1])


def _added(total: mx.array, a: int, b: int, part: mx.array) -> mx.array:
    """Return ``total`` with ``part`` added at keys ``a`` to ``b``, some of which may be new."""
    if a < total.shape[2]:
        part = part + total[:, :, a:b]
    spans = [total[:, :, :a], part, total[:, :, b:]]
    return mx.concatenate([span for span in spans if span.shape[2]], axis=2)
