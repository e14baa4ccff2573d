"""Steps through stages, beside one rank, plain MLX and torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.bench.benchmark import (
    Bench,
    Benchmark,
    Spread,
    add_bind,
    as_flags,
    environment,
    mebibytes,
    pinned,
    program,
    verdict,
)
from scripts.bench.trained import WIDE, demo_lacks, make_both, of_width, training
from scripts.bench.turns import Contender, in_turns
from shardmlx.pipeline.schedules import SCHEDULES, get_schedule
from shardmlx.pipeline.stage_map import StageMap, write_stage_map

RANKS = 2
ONE, PLAIN, COMPILED, TORCH_ONE = "one rank", "plain MLX", "plain MLX, mx.compile", "torch one rank"

OF_TORCH = {"1f1b": "1f1b", "interleaved-1f1b": "interleaved-1f1b"}
OF_TORCH |= {"interleaved-zb": "interleaved-1f1b", "zb-v": "zb-v"}
"""Torch's schedules, and ours whose stages lie as theirs do."""


@dataclass(frozen=True)
class Work:
    """The rows of a step, and tokens of each, that every contender computes."""

    rows: int = 16
    micro_batch_size: int = 2
    length: int = 256
    steps: int = 1
    """Steps of a turn."""

    @classmethod
    def of(cls, bench: Bench) -> Work:
        """Return the work that the benchmark's options ask for."""
        usual = cls(rows=8, micro_batch_size=1, length=32) if bench.quick else cls()
        return cls(
            rows=usual.rows,
            micro_batch_size=usual.micro_batch_size,
            length=bench.options.length or usual.length,
            steps=bench.options.steps or usual.steps,
        )

    @property
    def flags(self) -> dict[str, Any]:
        """Return the options of ``shardmlx.train``; one token more is a target only."""
        return {
            "fine_tune_type": "full", "num_layers": -1, "unfreeze_all": True, "optimizer": "adamw",
            "batch_size": self.rows, "micro_batch_size": self.micro_batch_size,
            "max_seq_length": self.length + 1,
        }  # fmt: skip

    @property
    def microbatches(self) -> int:
        """Return how many there are in a step."""
        return self.rows // self.micro_batch_size

    @property
    def shapes(self) -> dict[str, object]:
        """Return the options of programs that are not ours."""
        return {
            "rows": self.rows,
            "microbatches": self.microbatches,
            "length": self.length,
            "steps": self.steps,
        }


def changes_of(bench: Bench) -> dict[str, Any]:
    """Return the changes to the model that options ask for."""
    changes: dict[str, Any] = of_width(bench.options.width) if bench.options.width else {}
    if bench.options.vocabulary:
        changes["vocab_size"] = bench.options.vocabulary
    return changes


def torch_python(bench: Bench) -> str | None:
    """Return the Python that has torch; without one, say so."""
    found: str | None = bench.options.torch
    if found is None and find_spec("torch"):
        found = sys.executable
    if found is None:
        bench.say("torch is not installed: pip install '.[bench]', or give --torch")
    return found


class Arena:
    """Starts the contenders of ``pipeline``."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.work = bench, Work.of(bench)
        self.bind: str = bench.options.bind
        self.model, self.data = make_both(bench, **changes_of(bench))
        self.layers: int = WIDE["num_hidden_layers"]
        self.given: dict[str, list[tuple[int, ...]]] = {}
        for text in bench.options.split:
            name, _, sizes = text.partition("=")
            self.given.setdefault(name, []).append(tuple(map(int, sizes.split(","))))

    def contenders(self) -> Iterator[Contender]:
        """Start the contenders that were asked for, and yield them warm."""
        bench = self.bench
        for name in filter(bench.wants, (PLAIN, COMPILED)):
            yield self.plain(name)
        yield self.ours(ONE)
        some = ("1f1b",) if bench.quick else tuple(SCHEDULES)
        for schedule in filter(bench.wants, some):
            for sizes in self.divisions(schedule, schedule):
                yield self.ours(named(schedule, sizes), schedule, sizes)
        theirs = [each for each in OF_TORCH if bench.wants(f"torch {each}")]
        python = torch_python(bench) if theirs else None
        if python is None:
            return
        yield self.torch(python, TORCH_ONE)
        for schedule in theirs[:1] if bench.quick else theirs:
            for sizes in self.divisions(f"torch {schedule}", OF_TORCH[schedule]):
                yield self.torch(python, named(f"torch {schedule}", sizes), schedule, sizes)

    def divisions(self, name: str, schedule: str) -> Sequence[tuple[int, ...]]:
        """Return the layers of each stage, as ``--split`` says, or evenly, larger ones first."""
        stages = RANKS * get_schedule(schedule).default_virtual
        least, more = divmod(self.layers, stages)
        return self.given.get(name) or [tuple(least + (i < more) for i in range(stages))]

    def plain(self, name: str) -> Contender:
        """Return a loop without this project."""
        words = as_flags({"model": self.model, **self.work.shapes, "compile": name == COMPILED})
        command = [*pinned(0, self.bind), sys.executable, *program("loops", "plain", *words)]
        return Contender(name, [command], environments=[environment()])

    def ours(self, name: str, schedule: str = "1f1b", sizes: Sequence[int] = ()) -> Contender:
        """Return our contender with these layers on its stages; on one rank without ``sizes``."""
        ranks = RANKS if sizes else 1
        flags = {
            **self.work.flags, "model": self.model, "data": self.data, "schedule": schedule,
            "grad_checkpoint": self.bench.options.grad_checkpoint,
        }  # fmt: skip
        if sizes:
            flags["stage_map"] = self.bench.path(name).with_suffix(".yaml")
            placement = get_schedule(schedule).placement(ranks, len(sizes) // ranks)
            write_stage_map(StageMap.from_sizes(sizes, placement), flags["stage_map"])
        if self.bench.options.traces:
            file = self.bench.path(name).with_suffix(".json").name
            flags["trace"] = self.bench.options.traces / file
        steps = self.work.steps
        return training(self.bench, name, flags, ranks=ranks, steps=steps, bind=self.bind)

    def torch(
        self, python: str, name: str, schedule: str = "1f1b", sizes: Sequence[int] = ()
    ) -> Contender:
        """Return torch's contender with ``sizes`` as its stages; without them on one rank."""
        layers = ",".join(map(str, sizes or [self.layers]))
        shapes = {**self.work.shapes, "schedule": schedule, "sizes": layers}
        ranks = RANKS if sizes else 1
        meet = self.bench.path(name).with_suffix(".meet")
        given = {"config": self.model / "config.json", "meet": meet, **shapes}
        command = [python, *program("rivals", *as_flags(given))]
        places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
        return Contender(
            name,
            [[*pinned(rank, self.bind), *command] for rank in range(ranks)],
            ranks=ranks,
            environments=[{**environment(), **place} for place in places],
        )


def named(name: str, sizes: Sequence[int]) -> str:
    """Return the name of a contender with these layers on its stages."""
    return f"{name} {'/'.join(map(str, sizes))}"


def base_of(name: str) -> str:
    """Return what a contender is compared with."""
    return TORCH_ONE if name.startswith("torch") else ONE


def pipeline(bench: Bench) -> None:
    """A step through two stages against the same step on one rank, beside torch's pipelining.

    A Mistral-style model of 8 layers and width 512, all of it trained in float32 with AdamW; 8
    micro-batches of 2 sequences of 256 tokens; a core and a BLAS thread for each rank. The
    vocabulary is small, so that halves are equal; --vocabulary 8192 makes the head as heavy as 1.6
    layers: then divide by hand. --width and --length make memory another mix of weights and
    activations. Two dozen processes that rest between their turns need 20 GiB. By turns:

      plain MLX            a loop of the same work without this project; also with mx.compile
      one rank             shardmlx.train on one rank
      gpipe ... zb-v       shardmlx.train on two ranks, layers divided evenly, or as --split says
      torch ...            torch.distributed.pipelining over gloo with the same shapes, layers
                           divided in the same way; and one rank of it

    Efficiency is T1 / (2 T2), each against one rank of its own kind. Peaks are of MLX's arrays,
    beside those of the plan. With --grad-checkpoint ours compute activations again; the others do
    not. About a quarter of an hour on two cores.
    """
    arena = Arena(bench)
    found = in_turns(arena.contenders(), bench.rounds)
    bench.keep(turns=found.turns, summaries=found.summaries)
    show_speed(bench, arena.work, found.step_seconds)
    show_best(bench, found.step_seconds)
    show_memory(bench, found.summaries)


def show_speed(bench: Bench, work: Work, seconds: Mapping[str, Sequence[float]]) -> None:
    """Show the step of each contender, and its efficiency."""
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
        speed = work.rows * work.length / step.median
        lines.append((name, f"{step:.3f} s", f"{speed:.0f}", shown, goal))
    bench.show(
        f"{work.microbatches} micro-batches of {work.micro_batch_size} x {work.length}",
        ("what", "step, median (least-most)", "tokens/s", "T1 / (2 T2)", "goal"),
        lines,
    )


def show_best(bench: Bench, seconds: Mapping[str, Sequence[float]]) -> None:
    """Show our best schedule against 0.95, and against torch's best."""
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
            goal = "" if torch else verdict(efficiencies[best[torch]], 0.95)
            lines.append((best[torch], f"{efficiencies[best[torch]]:.3f}", goal))
    if len(best) == 2:
        ahead = efficiencies[best[False]] - efficiencies[best[True]]
        lines.append(("ours ahead of torch's by", f"{ahead:+.3f}", verdict(ahead, 0)))
        speed = Spread.of_ratios(seconds[best[True]], seconds[best[False]])
        lines.append(("tokens/s, ours / torch's", f"{speed:.2f}", ""))
    bench.show("Best schedules", ("what", "T1 / (2 T2)", "goal"), lines)


def show_memory(bench: Bench, summaries: Mapping[str, Any]) -> None:
    """Show peaks of both ranks against one rank's and the plan's."""
    (whole,) = [each["peak_memory_bytes"] for each in summaries[ONE]["ranks"]]
    lines = []
    for name, summary in summaries.items():
        peaks = [each["peak_memory_bytes"] for each in summary["ranks"]]
        planned = summary["predicted"]["peak_memory_bytes"]
        share = max(peaks) / whole
        above = max(peak / plan for peak, plan in zip(peaks, planned, strict=True))
        lines.append(
            (
                name,
                " / ".join(map(mebibytes, peaks)),
                " / ".join(map(mebibytes, planned)),
                f"{share:.3f}",
                verdict(share, 0.55, at_most=True) if name.startswith("1f1b") else "",
                f"{above:.3f}",
                verdict(above, 1.1, at_most=True),
            )
        )
    header = ("what", "peak MiB a rank", "planned", "most / one rank", "goal", "most / plan")
    bench.show("Peak memory of MLX's arrays", (*header, "goal"), lines)


def add_pipeline(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch")
    add_bind(parser)


PIPELINE = Benchmark("pipeline", pipeline, add_pipeline, rounds=7, needs=[demo_lacks])
