#!/usr/bin/env python3
"""Measure the time from the command to the first step of SmolLM2 on two ranks.

    python scripts/bench/startup.py [--json FILE]

LoRA of the demo's model on the demo's data, again and again: the files are in the system's cache
after the first time, and the data are tokenised anew. Also what each rank reads while it
loads, against the tensors of its stage and the header of the file. Run scripts/demo.sh once before,
and this where torch is not installed: transformers, which mlx-lm imports, imports it if it can.
About two minutes on two cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from _compare import ROOT, Spread, Table, machine, mpirun, parser_of, publish, run, verdict
from _models import PIRATE, SMOLLM2, check_prepared, make_long_rows, make_wide
from _training import as_flags

RANKS = 2

MILESTONES = {
    "Python": "mpirun, and Python's start",
    "options": "options, OpenBLAS",
    "imports": "importing MLX, mlx-lm, shardmlx",
    "MPI": "starting MPI, meeting the other rank",
    "prepared": "preparing the run",
    "first step": "first step",
}
"""Each with what happens between the one before and it. The second step is for comparison."""


@dataclass(frozen=True)
class Start:
    """The times of one start of the command, by rank, in seconds."""

    asked: float
    ranks: Sequence[Mapping[str, Any]]

    @property
    def total(self) -> float:
        last: float = max(rank["milestones"]["first step"] for rank in self.ranks)
        return last - self.asked

    def phases(self, rank: int) -> dict[str, float]:
        """Return the parts of the time, in order; those of "preparing the run" are indented."""
        times = {"": self.asked, **self.ranks[rank]["milestones"]}
        order = ["", *MILESTONES]
        phases = {}
        for before, after in pairwise(order):
            phases[MILESTONES[after]] = times[after] - times[before]
            if after == "prepared":
                inside = self.ranks[rank]["seconds"]
                phases |= {f"  {name}": seconds for name, seconds in inside.items()}
                rest = phases[MILESTONES[after]] - sum(inside.values())
                phases["  agreeing, waiting, the rest"] = rest
        phases["(second step)"] = times["second step"] - times["first step"]
        return phases


def start(model: Path, data: Path, directory: Path) -> Start:
    flags = {
        "model": model, "data": data, "num_layers": -1, "batch_size": 4, "iters": 2,
        "max_seq_length": 257, "steps_per_report": 1, "val_batches": 0,
        "adapter_path": directory / "out",
    }  # fmt: skip
    program = ROOT / "scripts/bench/_startup.py"
    asked = time.time()
    run(mpirun(RANKS, program, directory, *as_flags(flags)))
    ranks = [json.loads((directory / f"rank-{r}.json").read_text()) for r in range(RANKS)]
    return Start(asked, ranks)


def time_table(starts: Sequence[Start]) -> Table:
    """Medians of each phase on each rank."""
    of_ranks = [[each.phases(rank) for each in starts] for rank in range(RANKS)]
    names = list(dict.fromkeys(name for phases in of_ranks for each in phases for name in each))
    lines = [("start to first step", f"{Spread.of([each.total for each in starts]):.2f} s", "")]
    for name in names:
        cells = [
            f"{Spread.of([each[name] for each in phases]):.2f} s" if name in phases[0] else ""
            for phases in of_ranks
        ]
        lines.append((name, cells[0], cells[1]))
    header = ("what", *(f"rank {rank}, median (least-most)" for rank in range(RANKS)))
    return Table(f"Start to first step, {RANKS} ranks", header, lines)


def reading_table(last: Start, model: Path) -> Table:
    headers = sum(header_bytes(file) for file in model.glob("*.safetensors"))
    lines = []
    for number, rank in enumerate(last.ranks):
        stages, read = rank["loaded"]["stages"], rank["loaded"]["read"]
        lines.append(
            (
                str(number),
                f"{stages / 2**20:.3f} MiB",
                f"{headers / 2**20:.3f} MiB",
                f"{read / 2**20:.3f} MiB",
                verdict(read / (stages + headers), 1, at_most=True),
                f"{rank['loaded']['preparing'] / 2**20:.3f} MiB",
            )
        )
    header = (
        "rank", "tensors of its stage", "header", "read while loading", "of both",
        "read preparing, modules and data too",
    )  # fmt: skip
    return Table("Bytes read", header, lines)


def header_bytes(file: Path) -> int:
    """Return the bytes of a safetensors header: its length in eight bytes, and itself."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def main() -> None:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    check_prepared()
    facts = machine()
    if find_spec("torch") is not None:
        print("warning: torch is installed, and is imported: starts take longer", file=sys.stderr)
    rounds = options.rounds or (1 if options.quick else 7)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, data = SMOLLM2, PIRATE
        if options.quick:
            model = make_wide(directory / "model", hidden_size=64, vocab_size=512)
            data = make_long_rows(directory / "data", 8)
        starts = [start(model, data, directory) for _ in range(rounds)]
        tables = [time_table(starts), reading_table(starts[-1], model)]
    publish(options, facts, tables, {"starts": [vars(each) for each in starts]})


if __name__ == "__main__":
    main()
