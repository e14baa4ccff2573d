"""Time the operations of a layer, forward and backward, in MLX, in ours, or in torch.

    _operations.py mlx|ours|torch --rows R --length T

One process and one thread, float32. Rests after each turn, in which every operation is computed
several times; answers the least seconds of each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

from _turns import Turns

WIDTH, INNER, HEADS, GROUPS, VOCABULARY = 512, 1408, 8, 4, 1024
HEAD = WIDTH // HEADS
TIMES = 5

Work = Callable[[], None]


def mlx_work(rows: int, length: int, ours: bool) -> Mapping[str, Work]:
    """Return the operations in MLX, as mlx-lm calls them or as our engine does."""
    import shardmlx.common.prepared  # noqa: I001 - before MLX
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.optimizers import AdamW

    from shardmlx.engine.loss import loss_and_slopes
    from shardmlx.models.attention import ChunkedMask, attention_in_pieces
    from shardmlx.models.recompute import swiglu

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape)

    def both(function: Callable[..., mx.array], *inputs: mx.array) -> Work:
        gradient = mx.ones_like(function(*inputs))
        mx.eval(inputs, gradient)
        return lambda: mx.eval(*mx.vjp(function, list(inputs), [gradient]))

    tokens, mask = rows * length, ChunkedMask(128)
    x, gate, up = normal(tokens, WIDTH), normal(tokens, INNER), normal(tokens, INNER)
    q, k = normal(rows, HEADS, length, HEAD), normal(rows, GROUPS, length, HEAD)
    logits, targets = normal(tokens, VOCABULARY), mx.zeros(tokens, mx.int32)
    square, narrow, wide = normal(WIDTH, WIDTH), normal(WIDTH // 2, WIDTH), normal(INNER, WIDTH)

    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        if ours:
            return attention_in_pieces(q, k, v, HEAD**-0.5, mask)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD**-0.5, mask="causal")

    def of_own(gate: mx.array, up: mx.array) -> mx.array:
        return swiglu(gate, up) if ours else nn.silu(gate) * up

    counts = mx.ones(tokens)
    optimizer, weights = AdamW(1e-5), {"w": normal(INNER, WIDTH)}
    gradients = {"w": normal(INNER, WIDTH)}

    def update() -> None:
        mx.eval(optimizer.apply_gradients(gradients, weights), optimizer.state)

    def loss() -> None:
        mx.eval(loss_and_slopes(logits, targets, counts))

    return {
        "matrix products": _all(
            *[both(lambda x, w: x @ w.T, x, square)] * 2,
            *[both(lambda x, w: x @ w.T, x, narrow)] * 2,
            *[both(lambda x, w: x @ w.T, x, wide)] * 2,
            both(lambda x, w: x @ w, gate, wide),
        ),
        "attention": both(attention, q, k, normal(*k.shape)),
        "rotary positions": _all(
            *(
                both(
                    lambda x: mx.fast.rope(
                        x, HEAD, traditional=False, base=10000.0, scale=1.0, offset=0
                    ),
                    each,
                )
                for each in (q, k)
            )
        ),
        "norms": _all(*[both(lambda x, w: mx.fast.rms_norm(x, w, 1e-5), x, mx.ones(WIDTH))] * 2),
        "SwiGLU": both(of_own, gate, up),
        "loss of the logits": loss
        if ours
        else both(lambda x: nn.losses.cross_entropy(x, targets, reduction="sum"), logits),
        "AdamW of a matrix": update,
    }


def torch_work(rows: int, length: int) -> Mapping[str, Work]:
    """Return the same in torch."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, requires_grad=True)

    def both(function: Callable[..., Any], *inputs: Any) -> Work:
        gradient = torch.ones_like(function(*inputs))
        return lambda: _ignore(torch.autograd.grad(function(*inputs), inputs, gradient))

    tokens = rows * length
    x, gate, up = normal(tokens, WIDTH), normal(tokens, INNER), normal(tokens, INNER)
    q, k = normal(rows, HEADS, length, HEAD), normal(rows, GROUPS, length, HEAD)
    logits, targets = normal(tokens, VOCABULARY), torch.zeros(tokens, dtype=torch.long)
    square, narrow, wide = normal(WIDTH, WIDTH), normal(WIDTH // 2, WIDTH), normal(INNER, WIDTH)
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(HEAD // 2) / HEAD * 2))
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def attention(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    optimizer = torch.optim.AdamW([wide], lr=1e-5, weight_decay=0.01, fused=True)
    own = torch.randn(wide.shape)

    def update() -> None:
        wide.grad = own
        optimizer.step()

    return {
        "matrix products": _all(
            *[both(lambda x, w: x @ w.T, x, square)] * 2,
            *[both(lambda x, w: x @ w.T, x, narrow)] * 2,
            *[both(lambda x, w: x @ w.T, x, wide)] * 2,
            both(lambda x, w: x @ w, gate, wide),
        ),
        "attention": both(attention, q, k, normal(*k.shape)),
        "rotary positions": _all(both(rotate, q), both(rotate, k)),
        "norms": _all(*[both(lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-5), x, normal(WIDTH))] * 2),
        "SwiGLU": both(lambda gate, up: F.silu(gate) * up, gate, up),
        "loss of the logits": both(lambda x: F.cross_entropy(x, targets, reduction="sum"), logits),
        "AdamW of a matrix": update,
    }


def _all(*works: Work) -> Work:
    def run() -> None:
        for work in works:
            work()

    return run


def _ignore(result: object) -> None:
    """Drop a result."""


def seconds(work: Work) -> float:
    """Return the least of some times."""
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("mlx", "ours", "torch"))
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    options = parser.parse_args()
    turns = Turns(0)
    if options.library == "torch":
        works = torch_work(options.rows, options.length)
    else:
        works = mlx_work(options.rows, options.length, options.library == "ours")
    while True:
        turns.answer({name: seconds(work) for name, work in works.items()})
        turns.rest()


if __name__ == "__main__":
    main()
