"""``python -m scripts.bench.rivals OPTIONS``: torch's pipeline of a model of Mistral's kind.

One process a rank, started with RANK and WORLD_SIZE; gloo; random tokens; fused AdamW, the fastest
that torch has. Every rank rests after each turn of ``--steps`` steps, and answers the seconds of a
step. On one rank there is no pipeline, but a plain loop with the same micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules
from torch.optim import AdamW

from scripts.bench.turns import Turns

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb-v": schedules.ScheduleZBVZeroBubble,
}

ADAMW: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01, "fused": True}

Step = Callable[[Tensor, Tensor], None]
"""Forward and backward of all micro-batches of this rank."""


class Layer(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU, each after an RMS norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head = width // self.heads
        eps = config["rms_norm_eps"]
        self.attention_norm = nn.RMSNorm(width, eps)
        self.q = nn.Linear(width, self.heads * self.head, bias=False)
        self.k = nn.Linear(width, self.kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, self.kv_heads * self.head, bias=False)
        self.o = nn.Linear(self.heads * self.head, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return hidden states (rows, T, width) after the layer."""
        h = self.attention_norm(x)
        q, k = (
            rotate(each(h).unflatten(-1, (-1, self.head)).transpose(1, 2), cos, sin)
            for each in (self.q, self.k)
        )
        v = self.v(h).unflatten(-1, (-1, self.head)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (rows, heads, T, head), halves against each other."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Part(nn.Module):
    """Layers ``start`` to ``stop``, with embedding before the first and head after the last."""

    def __init__(self, config: dict[str, Any], start: int, stop: int, length: int) -> None:
        super().__init__()
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        is_last = stop == config["num_hidden_layers"]
        self.embedding = nn.Embedding(vocabulary, width) if start == 0 else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(start, stop))
        self.norm = nn.RMSNorm(width, config["rms_norm_eps"]) if is_last else None
        self.head = nn.Linear(width, vocabulary, bias=False) if is_last else None
        half = width // config["num_attention_heads"] // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, or the logits of the last part."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stages(
    config: dict[str, Any], options: argparse.Namespace, rank: int, ranks: int
) -> tuple[Step, AdamW]:
    """Return a step of this rank's share of a pipeline, or on one rank of a plain loop; and the
    optimizer that follows it."""
    sizes = [int(size) for size in options.sizes.split(",")]
    ends = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    placement = [i % ranks for i in range(len(sizes))]
    if options.schedule == "zb-v":
        placement = [*range(ranks), *reversed(range(ranks))]
    parts = {
        i: Part(config, *ends[i], options.length)
        for i, place in enumerate(placement)
        if place == rank
    }
    count = options.microbatches
    step = (
        alone(parts[0], count) if ranks == 1 else piped(parts, options.schedule, len(sizes), count)
    )
    weights = [weight for part in parts.values() for weight in part.parameters()]
    return step, AdamW(weights, **ADAMW)


def alone(part: Part, microbatches: int) -> Step:
    """Return a step in one process."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            (mean_loss(part(x), y) / microbatches).backward()

    return step


def piped(parts: dict[int, Part], name: str, count: int, microbatches: int) -> Step:
    """Return a step through ``count`` stages."""
    device = torch.device("cpu")
    own = [PipelineStage(part, index, count, device) for index, part in parts.items()]
    schedule: Any = SCHEDULES[name](
        own if issubclass(SCHEDULES[name], schedules.PipelineScheduleMulti) else own[0],
        microbatches,
        loss_fn=mean_loss,
    )
    takes, gives = 0 in parts, count - 1 in parts

    def step(inputs: Tensor, targets: Tensor) -> None:
        given = (inputs,) if takes else ()
        schedule.step(*given, target=targets if gives else None, return_outputs=False)

    return step


def read_options() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--sizes", help="layers of each stage, like 5,3")
    for name in ("rows", "microbatches", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--meet", required=True, help="file at which the ranks meet")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    turns = Turns(rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        where = f"file://{options.meet}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    config = json.loads(options.config.read_text())
    step, optimizer = stages(config, options, rank, ranks)
    tokens = torch.randint(0, config["vocab_size"], (options.rows, options.length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    while True:
        start = time.perf_counter()
        for _ in range(options.steps):
            step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
        seconds = (time.perf_counter() - start) / options.steps
        turns.answer({"step_seconds": seconds})
        turns.rest()


if __name__ == "__main__":
    main()
