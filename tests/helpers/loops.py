"""Training loops on ranks that are threads, and the same steps in one process of plain MLX."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.utils import load_model

from shardmlx.api.client import TrainClient, TrainedModel, train_client
from shardmlx.models.runtime.tuner import linear_to_lora_layers
from tests.helpers.local_transport import LocalNetwork, LocalTransport

STEPS = 6
RATE = 5e-3

ATTENTION = tuple(f"self_attn.{each}_proj" for each in "qkvo")
MLP = tuple(f"mlp.{each}_proj" for each in ("gate", "up", "down"))

Rows = list[dict[str, Any]]


def on_ranks(ranks: int, model: Path, work: Callable[[TrainClient], Any], **options: Any) -> Any:
    """Return what ``work`` makes of a client of ranks that have loaded a model."""

    def run(transport: LocalTransport) -> Any:
        how = {"model": str(model), "max_train_length": 48, "device": "cpu", **options}
        with train_client(transport, quiet=True, **how) as client:
            return None if client is None else work(client)

    return LocalNetwork(ranks, timeout=30).run(run)[0]


def rows_of(step: int, count: int = 6) -> Rows:
    """Rows of a step: random tokens of several lengths, some of which do not count."""
    random = np.random.RandomState(step)
    rows: Rows = []
    for _ in range(count):
        tokens = random.randint(1, 90, random.randint(6, 40))
        weights = (random.uniform(size=len(tokens) - 1) < 0.7).astype(np.float32)
        rows.append({"tokens": tokens[:-1], "target_tokens": tokens[1:], "weights": weights})
    return rows


def learn(model: TrainedModel, steps: range = range(STEPS), eps: float = 1e-12) -> list[float]:
    """Make steps; the losses."""
    losses = []
    for step in steps:
        loss = model.forward_backward(rows_of(step))
        update = model.optim_step(RATE, weight_decay=0.01, grad_clip_norm=2.0, eps=eps)
        losses.append(loss.result().metrics["loss:sum"])
        assert update.result()["grad_norm:mean"] > 0
    return losses


@cache
def oracle(
    path: Path, keys: tuple[str, ...], steps: int = STEPS, *, rank: int = 4, eps: float = 1e-12
) -> list[float]:
    """The losses of the same steps in one process, without anything of ours. Many layouts ask for
    the same."""
    model, _ = load_model(path)
    model.freeze()
    mx.random.seed(0)
    parameters = {"rank": rank, "scale": 32.0 / rank, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, -1, parameters)
    optimizer = optim.AdamW(RATE, [0.9, 0.95], eps, 0.01, bias_correction=True)

    def loss(model: nn.Module, rows: Rows) -> mx.array:
        total = mx.array(0.0)
        for row in rows:
            logits = model(mx.array(row["tokens"])[None])[0].astype(mx.float32)
            losses = nn.losses.cross_entropy(logits, mx.array(row["target_tokens"]))
            total = total + (losses * mx.array(row["weights"])).sum()
        return total

    losses = []
    for step in range(steps):
        value, gradients = nn.value_and_grad(model, loss)(model, rows_of(step))
        gradients, _ = optim.clip_grad_norm(gradients, 2.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(value.item())
    return losses


EVERYTHING = (*ATTENTION, *MLP)
