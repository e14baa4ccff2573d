"""Run torch's replicas of a model of Mistral's kind: DDP, DDP with a divided optimizer, FSDP2.

    _torch_replicas.py WAY OPTIONS

One process a replica, started with RANK and WORLD_SIZE; gloo; random tokens. Rests after each turn
of ``--steps`` steps. Every rank answers the seconds of a step, its process's peak memory, and what
of it was there before the model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _torch_pipeline import Part, mean_loss
from _turns import Turns
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

Backward = Callable[[Tensor, Tensor, bool], None]
"""Forward and backward of a micro-batch; True with the last of a step."""

# Fused is the fastest that torch has.
ADAMW: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01, "fused": True}


def copied(part: Part, *, divides: bool) -> tuple[Backward, Any]:
    """Return DDP, which sums once a step; each rank has the whole optimizer or its part of it."""
    module = DistributedDataParallel(part, gradient_as_bucket_view=True)
    weights = module.parameters()
    optimizer = (
        ZeroRedundancyOptimizer(weights, AdamW, **ADAMW) if divides else AdamW(weights, **ADAMW)
    )

    def backward(inputs: Tensor, targets: Tensor, is_last: bool) -> None:
        with nullcontext() if is_last else module.no_sync():
            mean_loss(module(inputs), targets).backward()

    return backward, optimizer


def divided(part: Part, *, sums_once: bool) -> tuple[Backward, Any]:
    """Return FSDP2, which divides layer by layer; it sums each micro-batch or once a step."""
    for layer in part.layers:
        fully_shard(layer)
    module: Any = fully_shard(part)

    def backward(inputs: Tensor, targets: Tensor, is_last: bool) -> None:
        module.set_requires_gradient_sync(is_last or not sums_once)
        mean_loss(module(inputs), targets).backward()

    return backward, AdamW(module.parameters(), **ADAMW)


WAYS: dict[str, Callable[[Part], tuple[Backward, Any]]] = {
    "ddp": lambda part: copied(part, divides=False),
    "zero1": lambda part: copied(part, divides=True),
    "fsdp2": lambda part: divided(part, sums_once=False),
    "fsdp2-once": lambda part: divided(part, sums_once=True),
}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of a replica")
    parser.add_argument("--microbatches", type=int, required=True, help="of a replica")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--meet", required=True, help="file at which the ranks meet")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    turns = Turns(rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.meet}", rank=rank, world_size=ranks
    )
    config = json.loads(options.config.read_text())
    before = resident_bytes()
    part = Part(config, 0, config["num_hidden_layers"], options.length)
    backward, optimizer = WAYS[options.way](part)
    tokens = torch.randint(0, config["vocab_size"], (options.rows, options.length + 1))
    inputs = tokens[:, :-1].contiguous().chunk(options.microbatches)
    targets = tokens[:, 1:].contiguous().chunk(options.microbatches)
    while True:
        start = time.perf_counter()
        for _ in range(options.steps):
            for number, (x, y) in enumerate(zip(inputs, targets, strict=True), start=1):
                backward(x, y, number == options.microbatches)
            optimizer.step()
            optimizer.zero_grad()
        seconds = (time.perf_counter() - start) / options.steps
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        turns.answer({"step_seconds": seconds, "process_peak_bytes": peak, "before_bytes": before})
        turns.rest()


if __name__ == "__main__":
    main()
