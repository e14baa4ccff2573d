"""Do the work of a step on one rank, as a plain loop over MLX and mlx-lm.

    _plain_mlx.py OPTIONS

One process, one model, one graph a micro-batch; gradients are added up over the micro-batches and
applied once a step. No stages, no messages, no gradient norm, no report; random tokens. With
``--compile`` the forward and backward of a micro-batch go through ``mx.compile``, as in mlx-lm.
Rests after each turn of ``--steps`` steps.
"""

from __future__ import annotations

import shardmlx.common.prepared

import argparse
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from _turns import Turns
from mlx.optimizers import AdamW
from mlx.utils import tree_map
from mlx_lm.utils import load_model


def mean_loss(model: nn.Module, inputs: mx.array, targets: mx.array) -> mx.array:
    loss: mx.array = nn.losses.cross_entropy(model(inputs), targets, reduction="mean")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    turns = Turns(0)
    model, _ = load_model(options.model)
    model.train()
    optimizer = AdamW(learning_rate=1e-5)
    loss_and_gradients = nn.value_and_grad(model, mean_loss)

    def microbatch(inputs: mx.array, targets: mx.array) -> tuple[mx.array, Any]:
        value: tuple[mx.array, Any] = loss_and_gradients(model, inputs, targets)
        return value

    if options.compile:
        microbatch = mx.compile(microbatch, inputs=model.state, outputs=model.state)
    shape = (options.rows, options.length + 1)
    tokens = mx.random.randint(0, model.args.vocab_size, shape)
    parts = mx.split(tokens, options.microbatches)
    mx.eval(parts)

    def step() -> None:
        total = None
        for part in parts:
            loss, gradients = microbatch(part[:, :-1], part[:, 1:])
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            mx.eval(loss, total)
        mean = tree_map(lambda gradient: gradient / options.microbatches, total)
        optimizer.update(model, mean)
        mx.eval(model.state, optimizer.state)

    while True:
        start = time.perf_counter()
        for _ in range(options.steps):
            step()
        seconds = (time.perf_counter() - start) / options.steps
        turns.answer({"step_seconds": seconds, "peak_memory_bytes": mx.get_peak_memory()})
        turns.rest()


if __name__ == "__main__":
    main()
