"""Recurrent layers whose gradient takes little memory: gated delta rules (Yang et al.,
arXiv:2412.06464) and state spaces (Dao and Gu, arXiv:2405.21060).

mlx-lm's gated delta rule goes from token to token. Its gradient keeps several states of each token,
and adds up whole rows for each: memory grows with the length, time with its square. Its state space
goes in steps of 256 tokens, and keeps several matrices of 256 x 256 numbers for each head and step.
Here the gradient keeps one state a piece, and computes one piece at a time again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import bailing_hybrid, gated_delta, rwkv7, ssm

from shardmlx.compat import calls, rebind, with_global
from shardmlx.models.runtime.activations import with_gradient
from shardmlx.models.sizes.layer_shape import PIECE

Rule = Callable[..., tuple[mx.array, mx.array]]
"""A function of arrays of tokens (B, T, ...), constants, and a state; returns the tokens' output
(B, T, ...) and the state after them."""


def use_pieces(layer: nn.Module) -> None:
    """Make the recurrent parts of a layer run piece by piece, from now on. Numbers are the same."""
    for module in layer.modules():
        if calls(module, "gated_delta_update"):
            rebind(module, "gated_delta_update", _UPDATE)
        if calls(module, "ssm_update", "_ssm"):
            rebind(module, "ssm_update", ssm_by_pieces, "_ssm")


def use_chunks(layer: nn.Module) -> None:
    """Make a layer compute in chunks of tokens, from now on, what its family computes from token to
    token. Sums of gated linear attention are then in another order, and in float32."""
    for module in layer.modules():
        if calls(module, "recurrent_gla"):
            rebind(module, "recurrent_gla", bailing_hybrid.recurrent_gla)
        if isinstance(module, rwkv7.Rwkv7TimeMixing):
            module._wkv7 = wkv7_by_pieces


def wkv7_by_pieces(r: mx.array, *rows: Any) -> tuple[mx.array, mx.array]:
    """Return what mlx-lm's ``_wkv7`` returns (Peng et al., arXiv:2503.14456), whose kernel for
    Metal has no gradient."""
    *others, state = rows
    batch, _, heads, size = r.shape
    start = mx.zeros((batch, heads, size, size), r.dtype) if state is None else state
    return _in_pieces(_wkv7, (r, *others), (), start)


def _wkv7(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    *rows, state = arrays
    return _in_pieces(_wkv7_step, rows, (), state, 1)


def _wkv7_step(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    *rows, state = arrays
    r, w, k, v, a, b = (x[:, 0, :, None] for x in rows)
    state = state * w + (state @ a.swapaxes(-1, -2)) @ b + v.swapaxes(-1, -2) @ k
    return (state @ r.swapaxes(-1, -2))[:, None], state


def gated_delta_by_pieces(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return what mlx-lm's ``gated_delta_ops`` returns."""
    if mask is not None:
        return gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask)  # type: ignore[no-any-return]
    # MLX's function knows one decay a head, not one for each of its keys.
    rule = _fused_delta if g.ndim == 3 else gated_delta.gated_delta_ops
    if rule is _fused_delta and mx.default_device() == mx.gpu and mx.metal.is_available():
        # MLX's kernel works in pieces itself; CUDA has none.
        return _fused_delta(q, k, v, g, beta, state)
    return _in_pieces(rule, (q, k, v, g, beta), (), state)


_UPDATE = with_global(gated_delta.gated_delta_update, "gated_delta_ops", gated_delta_by_pieces)


def _fused_delta(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    q, k, v, g, beta, state = arrays
    output, after = mx.fast.gated_delta_update(q, k, v, g, beta, state)
    return output, after


def ssm_by_pieces(
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return what mlx-lm's ``ssm_update`` returns."""
    if state is not None or mask is not None or lengths is not None:
        constants = (A_log, B, C, D, dt, dt_bias, state, time_step_limit)
        return ssm.ssm_update(x, *constants, mask, lengths)  # type: ignore[no-any-return]
    start = mx.zeros((x.shape[0], *x.shape[2:], B.shape[-1]), x.dtype)
    rule = partial(_ssm, time_step_limit)
    return _in_pieces(rule, (x, B, C, dt), (A_log, D, dt_bias), start)


def _ssm(limit: tuple[float, float], *arrays: mx.array) -> tuple[mx.array, mx.array]:
    x, b, c, dt, a_log, d, dt_bias, state = arrays
    output, after = ssm.ssm_attn(x, a_log, b, c, d, dt, dt_bias, state, limit)
    return output, after


def _in_pieces(
    rule: Rule,
    rows: Sequence[mx.array],
    constants: Sequence[mx.array],
    state: mx.array,
    length: int = PIECE,
) -> tuple[mx.array, mx.array]:
    count = len(rows)

    def forward(*arrays: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return output, last state, and the state at the start of each piece."""
        rows = arrays[:count]
        constants = arrays[count:-1]
        state = arrays[-1]
        outputs = []
        starts = []
        for first in range(0, rows[0].shape[1], length):
            starts.append(state)
            y, state = rule(*(x[:, first : first + length] for x in rows), *constants, state)
            outputs.append(y)
            # MLX would otherwise compute all states first, and keep them.
            (state,) = mx.depends([state], [y])
        return mx.concatenate(outputs, axis=1), state, mx.stack(starts)

    def gradients(
        primals: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> list[mx.array]:
        rows = primals[:count]
        constants = primals[count:-1]
        starts = outputs[2]
        of_output, of_state = cotangents[:2]
        found: list[Sequence[mx.array]] = []
        for i in reversed(range(len(starts))):
            part = slice(i * length, (i + 1) * length)
            # A piece waits for the whole piece after it: one piece at a time is in memory.
            inputs = mx.depends([x[:, part] for x in rows], [of_state])
            arguments = [*inputs, *constants, starts[i]]
            _, (*own, of_state) = mx.vjp(rule, arguments, [of_output[:, part], of_state])
            (of_state,) = mx.depends([of_state], own)
            found.append(own)
        each = [*zip(*reversed(found), strict=True)]
        sums = [sum(parts[1:], parts[0]) for parts in each[count:]]
        # Sums that waited for W would hold what they are computed from.
        joined = mx.depends([mx.concatenate([*parts], axis=1) for parts in each[:count]], sums)
        return [*joined, *sums, of_state]

    output, last, _ = with_gradient(forward, gradients)(*rows, *constants, state)
    return output, last
