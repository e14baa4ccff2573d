#!/usr/bin/env python3
"""Losses of SmolLM2's full fine-tune by what is rounded: weights, optimizer state, messages.

    python scripts/bench/curves.py [--only WORD ...] [--steps 200] [--json FILE]

Each run makes 200 steps of a row of 32 tokens, or where two replicas or stages send, of two rows;
Adam, 1e-5. Losses are compared with those of float32 on one rank with the same rows: the mean of
the last 20 steps, and of validation. Nothing is timed, so it does not matter what else the machine
does.

Two and a half hours of CPU time, most of it for 16-bit matrix products, which a CPU emulates.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _compare import Table, machine, mpirun, parser_of, publish, run
from _models import PIRATE, SMOLLM2, check_prepared
from _training import as_words, events_of, path_of

LENGTH = 32
LAST = 20
"""Steps at the end whose losses are averaged."""


@dataclass(frozen=True)
class Kind:
    """A run: its options, ranks, and rows of a step."""

    flags: dict[str, object]
    ranks: int = 1
    rows: int = 1


ONE, TWO = "float32", "float32, two rows"

KINDS = {
    ONE: Kind({"dtype": "float32"}),
    "bfloat16, master_weights": Kind({"dtype": "bfloat16", "master_weights": True}),
    "bfloat16": Kind({"dtype": "bfloat16"}),
    "float16, master_weights": Kind({"dtype": "float16", "master_weights": True}),
    TWO: Kind({"dtype": "float32"}, rows=2),
    "float32, two replicas": Kind({"dtype": "float32"}, ranks=2, rows=2),
    "--sum-dtype bfloat16": Kind({"dtype": "float32", "sum_dtype": "bfloat16"}, ranks=2, rows=2),
    "--sum-dtype int8": Kind({"dtype": "float32", "sum_dtype": "int8"}, ranks=2, rows=2),
}
"""Runs, each compared with the last before it, of float32 on one rank, that has as many rows."""


@dataclass(frozen=True)
class Curve:
    """Losses of the steps that were made, and of validation before and after them."""

    steps: Sequence[float]
    validation: Sequence[float]

    @property
    def last(self) -> float:
        return statistics.fmean(self.steps[-LAST:])


def curve_of(name: str, kind: Kind, steps: int, directory: Path) -> Curve:
    own = path_of(directory, name)
    metrics = own.with_suffix(".jsonl")
    flags = {
        "model": SMOLLM2, "data": PIRATE, "fine_tune_type": "full", "num_layers": -1,
        "unfreeze_all": True, "optimizer": "adam", "learning_rate": 1e-5, "pipeline_stages": 1,
        "batch_size": kind.rows, "max_seq_length": LENGTH + 1, "iters": steps,
        "steps_per_report": 1, "steps_per_eval": 10**9, "val_batches": 10, "save_every": 10**9,
        "adapter_path": own, "metrics_file": metrics,
    }  # fmt: skip
    words = as_words({**flags, **kind.flags}, own.with_suffix(".yaml"))
    run(mpirun(kind.ranks, "-m", "shardmlx.train", *words))
    events = events_of(metrics)
    losses = {
        what: [event["loss"] for event in events if event["event"] == what]
        for what in ("train", "val")
    }
    return Curve(losses["train"], losses["val"])


def table_of(curves: dict[str, Curve]) -> Table:
    lines = []
    for name, curve in curves.items():
        base = curves.get(ONE if KINDS[name].rows == 1 else TWO)
        cells = [f"{curve.last:.4f}", f"{curve.validation[-1]:.4f}"]
        if base is not None and curve is not base:
            cells[0] += f" ({100 * (curve.last / base.last - 1):+.3f}%)"
            cells[1] += f" ({100 * (curve.validation[-1] / base.validation[-1] - 1):+.3f}%)"
        lines.append((name, *cells))
    return Table(
        "SmolLM2-135M, full", ("what", f"loss of the last {LAST} steps", "validation"), lines
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of which a run has one")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    check_prepared()
    steps = 2 if options.quick else options.steps
    facts = machine()
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, kind in KINDS.items():
            if not options.only or any(word in name for word in options.only):
                curves[name] = curve_of(name, kind, steps, Path(directory))
                print(name, f"{curves[name].last:.4f}", flush=True)
    numbers = {
        name: {"steps": curve.steps, "validation": curve.validation}
        for name, curve in curves.items()
    }
    publish(options, facts, [table_of(curves)], {"curves": numbers})


if __name__ == "__main__":
    main()
