"""LoRA of SmolLM2, beside mlx_lm.lora."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.benchmark import (
    Bench,
    Benchmark,
    Spread,
    add_bind,
    environment,
    pinned,
    program,
    run,
    verdict,
)
from scripts.bench.trained import NEVER, PIRATE, SMOLLM2, demo_lacks, make_both, training
from scripts.bench.turns import Contender, in_turns
from testbed.jobs import ranks_command

THEIRS, ONE = "mlx_lm.lora", "1 rank"
THEIRS_2, ONE_2 = "mlx_lm.lora, 2 threads", "1 rank, 2 threads"
STAGES, REPLICAS, HYBRID = "2 ranks, 2 stages", "2 ranks, 2 replicas", "4 ranks, 2 x 2"

BASES = {ONE_2: THEIRS_2, HYBRID: THEIRS_2}
"""Contenders and what they are compared with; all others are compared with ``THEIRS``."""


def mlx_lm_lora(
    bench: Bench, name: str, options: Mapping[str, Any], *, threads: int = 1, bind: str = "core"
) -> Contender:
    """Return mlx_lm.lora with these options and those that all runs here have."""
    path = bench.path(name).with_suffix(".yaml")
    usual = {
        "train": True, "num_layers": -1, "val_batches": 1, "steps_per_eval": NEVER,
        "save_every": NEVER, "learning_rate": 1e-5, "adapter_path": str(path.with_suffix(".out")),
    }  # fmt: skip
    path.write_text(yaml.safe_dump({**usual, **options}))
    pin = pinned(0, bind) if threads == 1 else []
    command = [*pin, sys.executable, *program("loops", "mlx-lm", "-c", path)]
    return Contender(name, [command], environments=[environment(threads)])


def finetune(bench: Bench) -> None:
    """LoRA of SmolLM2-135M: tokens/s of shardmlx.train against mlx_lm.lora on one rank.

    The demo's model and data, float32, all layers, rank 8, Adam, batches of 8; one set of options
    for all contenders, so that they take the same batches in the same order, and every round
    compares the same tokens; a core and a BLAS thread for each process, or what the name says. By
    turns:

      mlx_lm.lora      one process, its own command, with OpenBLAS in front as our ranks have it
      1 rank           shardmlx.train
      2 ranks, plain   shardmlx.train as it is called without options of its own: what it chooses
      2 ranks, ...     two pipeline stages, divided by what shardmlx.profile measures at the start;
                       two replicas
      ..., packed      the same with --pack, which pads nothing
      2 x 2            two replicas of two stages: four ranks on two cores; against one rank, and
                       mlx_lm.lora, on two threads

    mlx_lm.lora makes one graph of a batch, compiled, and pads all its rows to the longest; with
    stages a micro-batch is one row, padded by itself. Tokens are those that count in the loss, in
    both. About a quarter of an hour on two cores.
    """
    found = in_turns(lora_contenders(bench), bench.rounds)
    bench.keep(turns=found.turns)
    speeds = found.of_rank_0("tokens_per_second")
    lines = []
    for name, own in speeds.items():
        base = BASES.get(name, THEIRS)
        times = Spread.of_ratios(own, speeds[base])
        goal = verdict(times.median, 1.8) if name.startswith("2 ranks") else ""
        against = f"{times:.2f} x {base}" if name != base else ""
        lines.append((name, f"{Spread.of(own):.1f}", against, goal))
        if name == HYBRID:
            times = Spread.of_ratios(own, speeds[ONE_2])
            lines.append(("  the same", "", f"{times:.2f} x {ONE_2}", ""))
    header = ("what", "tokens/s, median (least-most)", "same batches", "goal")
    bench.show("LoRA of SmolLM2-135M", header, lines)


def lora_contenders(bench: Bench) -> Iterator[Contender]:
    """Start the contenders that were asked for, and always those to compare with."""
    model, data = make_both(bench) if bench.quick else (SMOLLM2, PIRATE)
    steps = 1 if bench.quick else 2
    bind = bench.options.bind
    common: dict[str, Any] = {
        "model": str(model), "data": str(data), "fine_tune_type": "lora", "num_layers": -1,
        "batch_size": 8, "max_seq_length": 33 if bench.quick else 512, "optimizer": "adam",
        "learning_rate": 1e-5, "seed": 0,
        "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    }  # fmt: skip
    theirs = {**common, "iters": steps * (bench.rounds + 1), "steps_per_report": steps}

    def ours(name: str, ranks: int, threads: int = 1, **flags: object) -> Contender:
        own = bind if ranks <= 2 and threads == 1 else "none"
        given = {**common, **flags}
        return training(bench, name, given, ranks=ranks, steps=steps, threads=threads, bind=own)

    yield mlx_lm_lora(bench, THEIRS, theirs, bind=bind)
    yield ours(ONE, 1)
    if bench.wants("2 ranks, plain"):
        yield ours("2 ranks, plain", 2)
    if bench.wants(STAGES):
        profile = measured_profile(bench, model, common)
        divided: dict[str, Any] = {"partitioner": "balanced", "micro_batch_size": 1}
        divided["pipeline_stages"] = 2
        divided["profile"] = profile
        for schedule in ["1f1b"] if bench.quick else bench.options.schedules.split(","):
            yield ours(f"{STAGES}, {schedule}", 2, schedule=schedule, **divided)
        yield ours(f"{STAGES}, 1f1b, packed", 2, schedule="1f1b", pack=True, **divided)
    if bench.wants(REPLICAS):
        yield ours(REPLICAS, 2, pipeline_stages=1)
        yield ours(f"{REPLICAS}, packed", 2, pipeline_stages=1, pack=True)
    if bench.wants(f"{ONE}, packed"):
        yield ours(f"{ONE}, packed", 1, pack=True)
    if bench.wants(HYBRID) and not bench.quick:
        yield mlx_lm_lora(bench, THEIRS_2, theirs, threads=2)
        yield ours(ONE_2, 1, threads=2)
        yield ours(HYBRID, 4, pipeline_stages=2, micro_batch_size=1, schedule="1f1b")


def measured_profile(bench: Bench, model: Path, options: Mapping[str, Any]) -> Path:
    """Return what shardmlx.profile measures on two ranks."""
    config, profile = bench.path("profile.yaml"), bench.path("profile.json")
    config.write_text(yaml.safe_dump(dict(options)))
    lengths = "32" if bench.quick else "32,64,128"
    words = ["--rows", "1", "--lengths", lengths, "--config", str(config), "-o", str(profile)]
    run(ranks_command(2, "-m", "shardmlx.profile", model, *words, bind=bench.options.bind))
    return profile


def add_finetune(parser: argparse.ArgumentParser) -> None:
    schedules = "1f1b,zb-h1,zb-v,interleaved-1f1b"
    parser.add_argument("--schedules", default=schedules, help="of the two stages")
    add_bind(parser)


FINETUNE = Benchmark("finetune", finetune, add_finetune, rounds=7, needs=[demo_lacks])
