#!/usr/bin/env python3
"""Full fine-tunes of two replicas: ours, beside torch's DDP, ZeRO-1 and FSDP2 over gloo.

    python scripts/bench/replicas.py [--torch PYTHON] [--zero 0 1 3] [--json FILE]

A Mistral-style model of 8 layers and width 512, 25M parameters (--width 768: 57M), all of it
trained in float32 with AdamW; each replica has 4 micro-batches of 2 sequences of 256 tokens, a core
and a BLAS thread. Contenders, by turns:

  ours, --zero 0, 1 ...  shardmlx.train on two ranks, each a replica
  torch DDP              whole weights and optimizers; sums in buckets, once a step
  torch DDP, ZeRO-1      the same with ZeroRedundancyOptimizer
  torch FSDP2            fully_shard of each layer; weights are gathered, and gradients summed, in
                         each micro-batch
  torch FSDP2, sums once the same with gradients summed once a step

Peaks are of whole processes; ours also of MLX's arrays, beside the plan. --torch is a Python that
has torch. Seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _compare import (
    ROOT,
    Spread,
    Table,
    by_turns,
    environment,
    machine,
    parser_of,
    pinned,
    publish,
)
from _models import check_prepared, make_long_rows, make_wide, of_width
from _training import as_flags, path_of, step_seconds, training
from _turns import Contender, warmed_up
from pipeline import QUICK, Work

REPLICAS = 2
TORCH = {
    "torch DDP": "ddp",
    "torch DDP, ZeRO-1": "zero1",
    "torch FSDP2": "fsdp2",
    "torch FSDP2, sums once": "fsdp2-once",
}
LIKE = {"ours, --zero 0": "torch DDP", "ours, --zero 1": "torch DDP, ZeRO-1"}
LIKE |= {"ours, --zero 3": "torch FSDP2"}
"""Ours, and what divides as much of torch's."""


def ours(zero: int, model: Path, data: Path, work: Work, rounds: int, bind: str) -> Contender:
    chosen = {"pipeline_stages": 1, "zero": zero, "recompute": "none", "no-pack": True}
    return training(
        f"ours, --zero {zero}",
        {**work.flags, **chosen, "model": model, "data": data},
        ranks=REPLICAS,
        steps=work.steps,
        rounds=rounds,
        directory=model.parent,
        bind=bind,
    )


def torch(name: str, python: str, model: Path, work: Work, bind: str) -> Contender:
    shapes = {
        "config": model / "config.json", "rows": work.rows // REPLICAS,
        "microbatches": work.microbatches // REPLICAS, "length": work.length,
        "steps": work.steps, "meet": path_of(model.parent, name).with_suffix(".meet"),
    }  # fmt: skip
    program = str(ROOT / "scripts/bench/_torch_replicas.py")
    command = [python, program, TORCH[name], *as_flags(shapes)]
    return Contender(
        name,
        [[*pinned(rank, bind), *command] for rank in range(REPLICAS)],
        ranks=REPLICAS,
        environments=[
            {**environment(), "RANK": str(rank), "WORLD_SIZE": str(REPLICAS)}
            for rank in range(REPLICAS)
        ],
    )


def contenders(
    options: argparse.Namespace, directory: Path, work: Work, rounds: int
) -> Iterator[Contender]:
    """Start the contenders that were asked for, and yield them warm."""
    model = make_wide(directory / "model", **work.changes)
    data = make_long_rows(directory / "data")
    for zero in options.zero:
        yield ours(zero, model, data, work, rounds, options.bind)
    python = options.torch or (sys.executable if find_spec("torch") else None)
    if python is None:
        print("torch is not installed: pip install '.[bench]', or give --torch", file=sys.stderr)
        return
    for name in TORCH:
        if not options.only or any(word in name for word in options.only):
            yield torch(name, python, model, work, options.bind)


def table_of(
    work: Work, seconds: Mapping[str, Sequence[float]], memory: Mapping[str, Sequence[str]]
) -> Table:
    """Return the table of what was measured; ``memory`` are its last cells."""
    lines = []
    for name, own in seconds.items():
        step = Spread.of(own)
        like = seconds.get(LIKE.get(name, ""))
        ratio = f"{Spread.of_ratios(own, like):.2f} x {LIKE[name]}" if like else ""
        cells = (f"{step:.3f} s", f"{work.rows * work.length / step.median:.0f}", ratio)
        lines.append((name, *cells, *memory[name]))
    peaks = ("peak MiB of a process", "before the model", "MLX's arrays", "planned")
    header = ("what", "step, median (least-most)", "tokens/s", "step, beside", *peaks)
    return Table(f"{REPLICAS} replicas, full fine-tune", header, lines)


def mebibytes(*values: int) -> str:
    return f"{max(values) / 2**20:.0f}"


def memory_of_torch(answers: Sequence[Any]) -> Sequence[str]:
    keys = ("process_peak_bytes", "before_bytes")
    return (*(mebibytes(*(each[key] for each in answers)) for key in keys), "", "")


def memory_of_ours(summary: Any) -> Sequence[str]:
    ranks = summary["ranks"]
    return (
        mebibytes(*(each["process_peak_bytes"] for each in ranks)),
        "",
        mebibytes(*(each["peak_memory_bytes"] for each in ranks)),
        mebibytes(*summary["predicted"]["peak_memory_bytes"]),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of which torch's have one")
    parser.add_argument("--zero", nargs="*", type=int, default=[0, 1, 3], help="of ours")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch")
    parser.add_argument("--width", type=int, help="of the model's hidden states")
    parser.add_argument("--bind", choices=("none", "core"), default="core", help="of the ranks")
    options = parser.parse_args()
    check_prepared()
    work = replace(QUICK, rounds=1) if options.quick else Work(rounds=5)
    if options.width:
        work = replace(work, changes={**work.changes, **of_width(options.width)})
    rounds = options.rounds or work.rounds
    facts = machine()
    with tempfile.TemporaryDirectory() as name:
        started = contenders(options, Path(name), work, rounds)
        with warmed_up(started) as running:
            turns = by_turns({each.name: each.turn for each in running}, rounds)
            memory = {
                each.name: memory_of_torch(turns[each.name][-1])
                if each.name in TORCH
                else memory_of_ours(each.turn()[0])
                for each in running
            }
    seconds = {name: list(map(step_seconds, answers)) for name, answers in turns.items()}
    publish(options, facts, [table_of(work, seconds, memory)], {"turns": turns, "memory": memory})


if __name__ == "__main__":
    main()
