#!/usr/bin/env python3
"""Measure how a step's time and memory grow with ranks, micro-batches, lengths and model size.

    python scripts/bench/growth.py [--only ranks|microbatches|length|depth|width ...] [--json FILE]

A Mistral-style model of width 512, all of it trained in float32 with AdamW, 1F1B, one BLAS thread a
rank. One thing grows at a time; each is trained for a few steps and compared with what
shardmlx.profile, on two ranks at once, lets expect. Four ranks share two cores: their step is
measured, and cannot be as fast as predicted, which is for a core each. More ranks are simulated,
with the measured times of a layer and links that cost nothing; docs/developers/predictions.md has
links. A quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _compare import Table, machine, mpirun, parser_of, publish, run
from _models import WIDE, check_prepared, make_long_rows, make_wide, of_width
from _splits import Splits, write_split
from _training import as_flags, events_of

from shardmlx.config.specs import RunSpec
from shardmlx.config.train import TrainConfig

LAYERS_A_RANK = 4
MOST_MEASURED = 4
"""Ranks."""


@dataclass(frozen=True)
class Case:
    """The setup of a training run."""

    ranks: int = 2
    layers: int = 8
    width: int = 512
    microbatches: int = 8
    length: int = 256

    @property
    def model(self) -> dict[str, int]:
        """Changes to the configuration."""
        return {"num_hidden_layers": self.layers, **of_width(self.width)}

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "fine_tune_type": "full", "num_layers": -1, "unfreeze_all": True, "optimizer": "adamw",
            "batch_size": 2 * self.microbatches, "micro_batch_size": 2,
            "max_seq_length": self.length + 1,
        }  # fmt: skip

    @property
    def tokens(self) -> int:
        return 2 * self.microbatches * self.length

    @property
    def is_measured(self) -> bool:
        return self.ranks <= MOST_MEASURED


BASE = Case()
RANKS = (1, 2, 4, 8, 16, 32, 64)

GROWING: dict[str, list[Case]] = {
    "ranks": [replace(BASE, ranks=p, layers=LAYERS_A_RANK * p) for p in RANKS]
    + [replace(BASE, ranks=p, layers=LAYERS_A_RANK * p, microbatches=4 * p) for p in RANKS[3:]],
    "microbatches": [replace(BASE, microbatches=m) for m in (2, 4, 8, 16)],
    "length": [replace(BASE, length=length) for length in (64, 128, 256, 512)],
    "depth": [replace(BASE, layers=layers) for layers in (4, 8, 16)],
    "width": [replace(BASE, width=width) for width in (256, 512, 1024)],
}


@dataclass(frozen=True)
class Result:
    """The measurements of a step; bytes are the most of all ranks, bubbles the mean."""

    case: Case
    sizes: Sequence[int]
    predicted_seconds: float
    predicted_bubble: float
    predicted_peak: float
    seconds: float | None = None
    bubble: float | None = None
    peak: float | None = None


class Laboratory:
    """Measures cases; each only once."""

    def __init__(self, directory: Path, steps: int, quick: bool) -> None:
        self._directory, self._steps, self._quick = directory, steps, quick
        self._data = make_long_rows(directory / "data")
        self._profiles: dict[int, Path] = {}
        self._results: dict[Case, Result] = {}

    def result(self, case: Case) -> Result:
        if case not in self._results:
            print(case, file=sys.stderr, flush=True)
            self._results[case] = self._measure(case)
        return self._results[case]

    def _measure(self, case: Case) -> Result:
        model = self._model(case)
        run_spec = RunSpec.of(TrainConfig(model=str(model), **case.flags))
        splits = Splits.of(run_spec, self._profile(case), case.ranks, case.length)
        sizes = splits.balanced("1f1b")
        expected = splits.predicted("1f1b", sizes)
        result = Result(
            case,
            sizes,
            expected.step_seconds,
            expected.simulation.bubble,
            max(rank.peak for rank in expected.ranks),
        )
        if not case.is_measured:
            return result
        metrics = self._directory / "metrics.jsonl"
        flags = {
            **case.flags, "model": model, "data": self._data, "iters": 3 * self._steps,
            "steps_per_report": self._steps, "val_batches": 0, "save_every": 10**9,
            "metrics_file": metrics, "adapter_path": self._directory / "out",
            "stage_map": write_split("1f1b", sizes, case.ranks, self._directory / "map.yaml"),
        }  # fmt: skip
        run(mpirun(case.ranks, "-m", "shardmlx.train", *as_flags(flags)))
        events = events_of(metrics)
        # Without the warm-up the fastest: whatever disturbs a machine makes it slower.
        reports = [event for event in events if event["event"] == "train"][1:]
        fastest = min(reports, key=lambda event: float(event["step_seconds"]))
        return replace(
            result,
            seconds=fastest["step_seconds"],
            bubble=fastest["bubble"],
            peak=max(rank["peak_memory_bytes"] for rank in events[-1]["ranks"]),
        )

    def _model(self, case: Case) -> Path:
        """Random weights where it is to be trained; else its configuration is enough."""
        kind = "trained" if case.is_measured else "planned"
        path = self._directory / f"{kind}-{case.layers}-{case.width}"
        if case.is_measured:
            return path if path.exists() else make_wide(path, **case.model)
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({**WIDE, **case.model}))
        return path

    def _profile(self, case: Case) -> Path:
        """Measure two ranks at once, with a core each."""
        if case.width not in self._profiles:
            path = self._directory / f"profile-{case.width}.json"
            lengths = sorted({each.length for each in cases(self._quick) if each.is_measured})
            shapes = {"rows": 2, "lengths": ",".join(map(str, lengths)), "output": path}
            flags = as_flags({**case.flags, **shapes})
            run(mpirun(2, "-m", "shardmlx.profile", self._model(replace(case, ranks=2)), *flags))
            self._profiles[case.width] = path
        return self._profiles[case.width]


def cases(quick: bool) -> list[Case]:
    return [case for group in growing(quick).values() for case in group]


def growing(quick: bool) -> Mapping[str, Sequence[Case]]:
    if not quick:
        return GROWING
    tiny = Case(layers=4, width=64, microbatches=4, length=32)
    return {"ranks": [tiny, replace(tiny, ranks=8, layers=16)]}


def line(result: Result) -> tuple[str, ...]:
    case = result.case
    measured: tuple[str, ...] = ("", "", "", "")
    if result.seconds is not None and result.peak is not None:
        measured = (
            f"{result.seconds:.3f} s",
            f"{case.tokens / result.seconds:.0f}",
            f"{100 * (result.bubble or 0):.1f}%",
            f"{result.peak / 2**20:.0f} MiB",
        )
    return (
        str(case.ranks),
        f"{case.layers} x {case.width}",
        str(case.microbatches),
        str(case.length),
        f"{result.predicted_seconds:.3f} s",
        f"{case.tokens / result.predicted_seconds:.0f}",
        f"{100 * result.predicted_bubble:.1f}%",
        f"{result.predicted_peak / 2**20:.0f} MiB",
        *measured,
    )


HEADER = (
    "ranks", "layers x width", "micro-batches of 2", "tokens", "step predicted", "tokens/s",
    "bubble", "peak", "measured", "tokens/s", "bubble", "peak",
)  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", choices=GROWING, default=list(GROWING))
    options: argparse.Namespace = parser.parse_args()
    check_prepared()
    facts = machine()
    steps = options.rounds or (1 if options.quick else 2)
    tables, results = [], {}
    with tempfile.TemporaryDirectory() as name:
        laboratory = Laboratory(Path(name), steps, options.quick)
        for what, group in growing(options.quick).items():
            if what in options.only:
                of_group = [laboratory.result(case) for case in group]
                results[what] = list(map(asdict, of_group))
                tables.append(Table(f"Growing: {what}", HEADER, list(map(line, of_group))))
    publish(options, facts, tables, {"results": results})


if __name__ == "__main__":
    main()
