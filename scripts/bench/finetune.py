#!/usr/bin/env python3
"""LoRA of SmolLM2-135M: tokens/s of shardmlx.train against mlx_lm.lora on one rank.

    python scripts/bench/finetune.py [--only WORD ...] [--json FILE]

The demo's model and data, float32, all layers, rank 8, Adam, batches of 8; one file of options for
all contenders, so that they take the same batches in the same order, and every round compares the
same tokens; a core and a BLAS thread for each process, or what the name says. By turns:

  mlx_lm.lora      one process, its own command, with OpenBLAS in front as our ranks have it
  1 rank           shardmlx.train
  2 ranks, plain   shardmlx.train as it is called without options of its own: what it chooses
  2 ranks, ...     two pipeline stages, divided by what shardmlx.profile measures at the start; two
                   replicas
  ..., packed      the same with --pack, which pads nothing
  2 x 2            two replicas of two stages: four ranks on two cores; against one rank, and
                   mlx_lm.lora, on two threads

mlx_lm.lora makes one graph of a batch, compiled, and pads all its rows to the longest; with stages
a micro-batch is one row, padded by itself. Tokens are those that count in the loss, in both. Run
scripts/demo.sh once before: it prepares model and data. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from _compare import (
    ROOT,
    Spread,
    Table,
    by_turns,
    environment,
    machine,
    mpirun,
    parser_of,
    pinned,
    publish,
    run,
    verdict,
)
from _models import PIRATE, SMOLLM2, check_prepared, make_long_rows, make_wide
from _training import training
from _turns import Contender, warmed_up

THEIRS, ONE = "mlx_lm.lora", "1 rank"
THEIRS_2, ONE_2 = "mlx_lm.lora, 2 threads", "1 rank, 2 threads"
PLAIN = "2 ranks, plain"
STAGES, REPLICAS, HYBRID = "2 ranks, 2 stages", "2 ranks, 2 replicas", "4 ranks, 2 x 2"

BASES = {ONE_2: THEIRS_2, HYBRID: THEIRS_2}
"""Contenders and what they are compared with; all others are compared with ``THEIRS``."""


@dataclass(frozen=True)
class Work:
    steps: int = 2
    """Steps of a turn."""
    rounds: int = 7
    length: int = 512
    """Limit of a sequence in tokens; the demo's have some tens."""
    profiled: str = "32,64,128"


QUICK = Work(steps=1, rounds=1, length=33, profiled="32")


def config_file(model: Path, data: Path, work: Work, rounds: int, path: Path) -> Path:
    """Options that ``mlx_lm.lora`` and ``shardmlx.train`` both take."""
    options = {
        "model": str(model), "data": str(data), "train": True, "fine_tune_type": "lora",
        "num_layers": -1, "batch_size": 8, "max_seq_length": work.length, "optimizer": "adam",
        "learning_rate": 1e-5, "seed": 0, "iters": work.steps * (rounds + 1),
        "steps_per_report": work.steps, "val_batches": 1, "steps_per_eval": 10**9,
        "save_every": 10**9, "adapter_path": str(path.with_suffix(".adapters")),
        "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(options))
    return path


def contenders(
    config: Path, model: Path, work: Work, rounds: int, options: argparse.Namespace
) -> Iterator[Contender]:
    """Start the contenders that were asked for, and always those to compare with."""

    def theirs(name: str, threads: int) -> Contender:
        program = ROOT / "scripts/bench/_mlx_lm_lora.py"
        pin = pinned(0, options.bind) if threads == 1 else []
        command = [*pin, sys.executable, str(program), "-c", str(config)]
        return Contender(name, [command], environments=[environment(threads)])

    def ours(name: str, ranks: int, threads: int = 1, **flags: object) -> Contender:
        return training(
            name,
            {"config": config, **flags},
            ranks=ranks,
            steps=work.steps,
            rounds=rounds,
            directory=config.parent,
            threads=threads,
            bind=options.bind if ranks <= 2 and threads == 1 else "none",
        )

    def wanted(name: str) -> bool:
        return not options.only or any(word in name for word in options.only)

    yield theirs(THEIRS, 1)
    yield ours(ONE, 1)
    if wanted(PLAIN):
        yield ours(PLAIN, 2)
    if wanted(STAGES):
        profile = config.with_suffix(".profile")
        shapes = ["--rows", 1, "--lengths", work.profiled, "--config", config, "-o", profile]
        run(mpirun(2, "-m", "shardmlx.profile", model, *shapes, bind=options.bind))
        divided: dict[str, Any] = {
            "partitioner": "balanced",
            "profile": profile,
            "micro_batch_size": 1,
        }
        for schedule in options.schedules.split(","):
            yield ours(f"{STAGES}, {schedule}", 2, schedule=schedule, **divided)
        yield ours(f"{STAGES}, 1f1b, packed", 2, schedule="1f1b", pack=True, **divided)
    if wanted(REPLICAS):
        yield ours(REPLICAS, 2, pipeline_stages=1)
        yield ours(f"{REPLICAS}, packed", 2, pipeline_stages=1, pack=True)
    if wanted(f"{ONE}, packed"):
        yield ours(f"{ONE}, packed", 1, pack=True)
    if wanted(HYBRID) and not options.quick:
        yield theirs(THEIRS_2, 2)
        yield ours(ONE_2, 1, threads=2)
        yield ours(HYBRID, 4, pipeline_stages=2, micro_batch_size=1, schedule="1f1b")


def tokens_per_second(answers: Sequence[Any]) -> float:
    return float(answers[0]["tokens_per_second"])


def table(speeds: Mapping[str, Sequence[float]]) -> Table:
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
    return Table("LoRA of SmolLM2-135M", header, lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of which a name must have one")
    parser.add_argument(
        "--schedules", default="1f1b,zb-h1,zb-v,interleaved-1f1b", help="of the two stages"
    )
    parser.add_argument("--bind", choices=("none", "core"), default="core", help="of the ranks")
    options = parser.parse_args()
    check_prepared()
    work = QUICK if options.quick else Work()
    if options.quick:
        options.schedules = "1f1b"
    rounds = options.rounds or work.rounds
    facts = machine()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, data = SMOLLM2, PIRATE
        if options.quick:
            model = make_wide(directory / "model", hidden_size=64, vocab_size=512)
            data = make_long_rows(directory / "data")
        config = config_file(model, data, work, rounds, directory / "config.yaml")
        with warmed_up(contenders(config, model, work, rounds, options)) as running:
            turns = by_turns({each.name: each.turn for each in running}, rounds)
    speeds = {name: list(map(tokens_per_second, answers)) for name, answers in turns.items()}
    publish(options, facts, [table(speeds)], {"turns": turns})


if __name__ == "__main__":
    main()
