#!/usr/bin/env python3
"""A step through two stages against the same step on one rank, beside torch's pipelining.

    python scripts/bench/pipeline.py [--only WORD ...] [--split NAME=5,3 ...] [--grad-checkpoint]
                                     [--json FILE]

A Mistral-style model of 8 layers and width 512, all of it trained in float32 with AdamW; 8
micro-batches of 2 sequences of 256 tokens; a core and a BLAS thread for each rank. The vocabulary
is small, so that halves are equal; --vocabulary 8192 makes the head as heavy as 1.6 layers: then
divide by hand. --width and --length make memory another mix of weights and activations. Two dozen
processes that rest between their turns need 20 GiB.
Contenders, by turns:

  plain MLX            a loop of the same work without this project; also with mx.compile
  one rank             shardmlx.train on one rank
  gpipe ... zb-v       shardmlx.train on two ranks, layers divided evenly, or as --split says
  torch ...            torch.distributed.pipelining over gloo with the same shapes, layers divided
                       in the same way; and one rank of it

Efficiency is T1 / (2 T2), each against one rank of its own kind. Peaks are of MLX's arrays, beside
those of the plan, and of whole processes for torch. With --grad-checkpoint ours compute activations
again; the others do not. Needs pip install '.[bench]' for torch. About a quarter of an hour on two
cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _compare import (
    Spread,
    Table,
    by_turns,
    environment,
    machine,
    parser_of,
    pinned,
    publish,
    verdict,
)
from _models import WIDE, check_prepared, make_long_rows, make_wide, of_width
from _splits import even, write_split
from _training import as_flags, path_of, step_seconds, training
from _turns import Contender, warmed_up

from shardmlx.pipeline.schedules import SCHEDULES, get_schedule

HERE = Path(__file__).resolve().parent
RANKS = 2
ONE, PLAIN, COMPILED, TORCH_ONE = "one rank", "plain MLX", "plain MLX, mx.compile", "torch one rank"

OF_TORCH = {"1f1b": "1f1b", "interleaved-1f1b": "interleaved-1f1b"}
OF_TORCH |= {"interleaved-zb": "interleaved-1f1b", "zb-v": "zb-v"}
"""Torch's schedules, and ours whose stages lie as theirs do."""


@dataclass(frozen=True)
class Work:
    """The work that every contender does."""

    rows: int = 16
    micro_batch_size: int = 2
    length: int = 256
    changes: Mapping[str, Any] = field(default_factory=dict)
    schedules: Sequence[str] = tuple(SCHEDULES)
    torch_schedules: Sequence[str] = tuple(OF_TORCH)
    steps: int = 1
    """Steps of a turn."""
    rounds: int = 7
    grad_checkpoint: bool = False
    """True for gradient checkpointing in our contenders."""

    @property
    def flags(self) -> dict[str, Any]:
        """Return the options of ``shardmlx.train``; one token more is a target only."""
        return {
            "fine_tune_type": "full", "num_layers": -1, "unfreeze_all": True, "optimizer": "adamw",
            "batch_size": self.rows, "micro_batch_size": self.micro_batch_size,
            "max_seq_length": self.length + 1, "grad_checkpoint": self.grad_checkpoint,
        }  # fmt: skip

    @property
    def microbatches(self) -> int:
        return self.rows // self.micro_batch_size

    @property
    def tokens(self) -> int:
        return self.rows * self.length


QUICK = Work(
    rows=8,
    micro_batch_size=1,
    length=32,
    changes={"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512},
    schedules=("1f1b",),
    torch_schedules=("1f1b",),
    rounds=2,
)


class Arena:
    """Starts the contenders of one run, in a directory of their own."""

    def __init__(
        self, work: Work, directory: Path, rounds: int, bind: str, traces: Path | None
    ) -> None:
        self.work, self.directory, self.rounds, self.bind = work, directory, rounds, bind
        self.traces = traces
        self.model = make_wide(directory / "model", **work.changes)
        self.data = make_long_rows(directory / "data")
        self.layers = {**WIDE, **work.changes}["num_hidden_layers"]

    @property
    def shapes(self) -> list[str]:
        """Return the options of the programs that are not ours."""
        work = self.work
        return as_flags(
            {
                "rows": work.rows,
                "microbatches": work.microbatches,
                "length": work.length,
                "steps": work.steps,
            }
        )

    def plain(self, name: str) -> Contender:
        program = [sys.executable, str(HERE / "_plain_mlx.py"), "--model", str(self.model)]
        compiled = ["--compile"] if name == COMPILED else []
        command = [*pinned(0, self.bind), *program, *self.shapes, *compiled]
        return Contender(name, [command], environments=[environment()])

    def ours(self, name: str, schedule: str = "1f1b", sizes: Sequence[int] = ()) -> Contender:
        """Return our contender with these layers on its stages; on one rank without ``sizes``."""
        ranks = RANKS if sizes else 1
        flags = {**self.work.flags, "model": self.model, "data": self.data, "schedule": schedule}
        if sizes:
            path = path_of(self.directory, name).with_suffix(".yaml")
            flags["stage_map"] = write_split(schedule, sizes, ranks, path)
        if self.traces:
            flags["trace"] = path_of(self.traces, name).with_suffix(".json")
        return training(
            name,
            flags,
            ranks=ranks,
            steps=self.work.steps,
            rounds=self.rounds,
            directory=self.directory,
            bind=self.bind,
        )

    def torch(self, name: str, schedule: str = "1f1b", sizes: Sequence[int] = ()) -> Contender:
        """Return torch's contender with ``sizes`` as its stages; without them on one rank."""
        ranks = RANKS if sizes else 1
        meet = path_of(self.directory, name).with_suffix(".meet")
        layers = ",".join(map(str, sizes or [self.layers]))
        command = [sys.executable, str(HERE / "_torch_pipeline.py"), "--schedule", schedule]
        command += ["--config", str(self.model / "config.json"), "--sizes", layers]
        command += ["--meet", str(meet), *self.shapes]
        return Contender(
            name,
            [[*pinned(rank, self.bind), *command] for rank in range(ranks)],
            ranks=ranks,
            environments=[
                {**environment(), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
                for rank in range(ranks)
            ],
        )


def entries(
    arena: Arena, given: Mapping[str, Sequence[tuple[int, ...]]], only: Sequence[str]
) -> Iterator[Contender]:
    """Start the contenders that were asked for, and yield them warm."""

    def wanted(name: str) -> bool:
        return not only or any(word in name for word in only)

    work = arena.work
    has_torch = find_spec("torch") is not None
    if not has_torch:
        print("torch is not installed: pip install '.[bench]'", file=sys.stderr)

    def divisions(name: str, schedule: str) -> Sequence[tuple[int, ...]]:
        stages = RANKS * get_schedule(schedule).default_virtual
        return given.get(name) or [even(arena.layers, stages)]

    for name in (PLAIN, COMPILED):
        if wanted(name):
            yield arena.plain(name)
    yield arena.ours(ONE)
    for schedule in filter(wanted, work.schedules):
        for sizes in divisions(schedule, schedule):
            yield arena.ours(f"{schedule} {'/'.join(map(str, sizes))}", schedule, sizes)
    if not has_torch or not (names := [n for n in work.torch_schedules if wanted(f"torch {n}")]):
        return
    yield arena.torch(TORCH_ONE)
    for schedule in names:
        for sizes in divisions(f"torch {schedule}", OF_TORCH[schedule]):
            name = f"torch {schedule} {'/'.join(map(str, sizes))}"
            yield arena.torch(name, schedule, sizes)


def base_of(name: str) -> str:
    return TORCH_ONE if name.startswith("torch") else ONE


def speed_table(work: Work, seconds: Mapping[str, Sequence[float]]) -> Table:
    lines = []
    for name, own in seconds.items():
        step, base = Spread.of(own), seconds[base_of(name)]
        ranks = 1 if name in (ONE, PLAIN, COMPILED, TORCH_ONE) else RANKS
        efficiency = Spread.of_ratios([each / ranks for each in base], own)
        goal = ""
        if name in (PLAIN, COMPILED):
            overhead = Spread.of_ratios(base, own)
            reached = verdict(overhead.median, 1.03, at_most=True)
            goal = f"one rank takes {overhead:.3f} of it, {reached}"
        elif name.startswith("1f1b"):
            goal = verdict(efficiency.median, 0.90)
        shown = f"{efficiency:.3f}" if ranks > 1 else ""
        lines.append((name, f"{step:.3f} s", f"{work.tokens / step.median:.0f}", shown, goal))
    return Table(
        f"{work.microbatches} micro-batches of {work.micro_batch_size} x {work.length}",
        ("what", "step, median (least-most)", "tokens/s", "T1 / (2 T2)", "goal"),
        lines,
    )


def best_table(seconds: Mapping[str, Sequence[float]]) -> Table:
    """Our best schedule against 0.95, and against torch's best."""
    efficiencies = {
        name: Spread.of_ratios(seconds[base_of(name)], own).median / RANKS
        for name, own in seconds.items()
        if name not in (ONE, PLAIN, COMPILED, TORCH_ONE)
    }
    lines = []
    best: dict[bool, str] = {}
    for torch in (False, True):
        names = [name for name in efficiencies if name.startswith("torch") == torch]
        if names:
            best[torch] = max(names, key=lambda name: efficiencies[name])
    for torch, name in best.items():
        goal = verdict(efficiencies[name], 0.95) if not torch else ""
        lines.append((name, f"{efficiencies[name]:.3f}", goal))
    if len(best) == 2:
        ahead = efficiencies[best[False]] - efficiencies[best[True]]
        lines.append(("ours ahead of torch's by", f"{ahead:+.3f}", verdict(ahead, 0)))
        speed = Spread.of_ratios(seconds[best[True]], seconds[best[False]])
        lines.append(("tokens/s, ours / torch's", f"{speed:.2f}", ""))
    return Table("Best schedules", ("what", "T1 / (2 T2)", "goal"), lines)


def memory_table(summaries: Mapping[str, Any]) -> Table:
    """Peaks of both ranks against one rank's and the plan's."""
    (whole,) = [each["peak_memory_bytes"] for each in summaries[ONE]["ranks"]]
    lines = []
    for name, summary in summaries.items():
        peaks = [each["peak_memory_bytes"] for each in summary["ranks"]]
        planned = summary["predicted"]["peak_memory_bytes"]
        share = max(peaks) / whole
        above = max(peak / plan for peak, plan in zip(peaks, planned, strict=True))
        goal = verdict(share, 0.55, at_most=True) if name.startswith("1f1b") else ""
        lines.append(
            (
                name,
                " / ".join(f"{peak / 2**20:.0f}" for peak in peaks),
                " / ".join(f"{plan / 2**20:.0f}" for plan in planned),
                f"{share:.3f}",
                goal,
                f"{above:.3f}",
                verdict(above, 1.1, at_most=True),
            )
        )
    header = (
        "what",
        "peak MiB a rank",
        "planned",
        "most / one rank",
        "goal",
        "most / plan",
        "goal",
    )
    return Table("Peak memory of MLX's arrays", header, lines)


def measure(options: argparse.Namespace) -> None:
    work = QUICK if options.quick else Work()
    changes = dict(work.changes)
    if options.vocabulary:
        changes["vocab_size"] = options.vocabulary
    if options.width:
        changes |= of_width(options.width)
    work = replace(
        work,
        changes=changes,
        length=options.length or work.length,
        steps=options.steps or work.steps,
        grad_checkpoint=options.grad_checkpoint,
    )
    rounds = options.rounds or work.rounds
    facts = machine()
    given: dict[str, list[tuple[int, ...]]] = {}
    for text in options.split:
        name, _, sizes = text.partition("=")
        given.setdefault(name, []).append(tuple(map(int, sizes.split(","))))
    with tempfile.TemporaryDirectory() as name:
        arena = Arena(work, Path(name), rounds, options.bind, options.traces)
        with warmed_up(entries(arena, given, options.only)) as contenders:
            turns = by_turns({each.name: each.turn for each in contenders}, rounds)
            summaries = {
                each.name: each.turn()[0]
                for each in contenders
                if base_of(each.name) == ONE and each.name not in (PLAIN, COMPILED)
            }
    seconds = {name: list(map(step_seconds, answers)) for name, answers in turns.items()}
    tables = [speed_table(work, seconds), best_table(seconds), memory_table(summaries)]
    publish(options, facts, tables, {"turns": turns, "summaries": summaries})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of which a name must have one")
    parser.add_argument(
        "--split", action="append", default=[], metavar="NAME=5,3", help="layers of each stage"
    )
    parser.add_argument("--vocabulary", type=int, help="of the model")
    parser.add_argument("--width", type=int, help="of its hidden states")
    parser.add_argument("--length", type=int, help="tokens of a row")
    parser.add_argument("--steps", type=int, help="of a turn, of which the mean counts")
    parser.add_argument(
        "--traces", type=Path, metavar="DIRECTORY", help="write what ranks did when, by contender"
    )
    parser.add_argument(
        "--grad-checkpoint", action="store_true", help="compute activations again, in ours"
    )
    parser.add_argument("--bind", choices=("none", "core"), default="core", help="of the ranks")
    options = parser.parse_args()
    check_prepared()
    measure(options)


if __name__ == "__main__":
    main()
