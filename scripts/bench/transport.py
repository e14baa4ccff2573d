#!/usr/bin/env python3
"""Measure what messages cost: Transport beside raw MPI, waits in a step, the engine's own time.

    python scripts/bench/transport.py [--only link|exposed|actions ...] [--json FILE]

  link      two ranks of this machine, over shared memory and over TCP on its loopback: messages of
            4 bytes to 64 MiB by mpi4py's Send and Recv, Isend, Irecv and Waitall, and by Transport,
            in the same process, by turns, out of the same buffers
  exposed   shardmlx.train with two stages that pass each other 64 MiB a micro-batch, over TCP and
            over shared memory: how long ranks wait for messages that are already made
  actions   the engine with stages that do nothing, alone and with messages of 256 bytes

About five minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _compare import ROOT, Spread, Table, machine, mpirun, parser_of, publish, run, verdict
from _models import check_prepared, make_long_rows, make_wide
from _training import as_flags, events_of

HERE = ROOT / "scripts/bench"
PARTS = ("link", "exposed", "actions")

OVER = {
    "shared memory": {"OMPI_MCA_btl": "sm,self", "OMPI_MCA_pml": "ob1"},
    "TCP": {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": "lo"},
}
"""Settings of Open MPI that decide which way messages go."""


@dataclass(frozen=True)
class Work:
    rounds: int = 9
    sizes: Sequence[int] = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    rows: int = 64
    """Rows of a micro-batch; with ``length`` tokens of ``hidden_size`` floats: 64 MiB."""
    length: int = 256
    microbatches: int = 4
    changes: Mapping[str, Any] = field(
        default_factory=lambda: {
            "num_hidden_layers": 2,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        }
    )
    steps: int = 3
    empty_steps: int = 100
    """Steps of the engine without computing, with 16 micro-batches."""


QUICK = Work(
    rounds=1,
    sizes=(4, 1 << 20),
    rows=4,
    length=64,
    microbatches=2,
    changes={"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512},
    steps=1,
    empty_steps=5,
)


def size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def links(work: Work, rounds: int) -> tuple[Table, Any]:
    measured = {}
    for over, settings in OVER.items():
        command = mpirun(2, HERE / "_link.py", rounds, *work.sizes)
        measured[over] = json.loads(run(command, settings))
    return link_table(measured), measured


def link_table(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Return the table of what ``_link.py`` says of each way."""
    lines = []
    for over, results in measured.items():
        for raw, ours in zip(results[::2], results[1::2], strict=True):
            nbytes = raw["bytes"]
            speeds = [nbytes / statistics.median(each["flow"]) / 1e9 for each in (raw, ours)]
            times = [statistics.median(each["ping_pong"]) * 1e6 for each in (raw, ours)]
            speed = Spread.of_ratios(raw["flow"], ours["flow"])
            time = Spread.of_ratios(ours["ping_pong"], raw["ping_pong"])
            lines.append(
                (
                    over,
                    size(nbytes),
                    f"{speeds[0]:.3f}",
                    f"{speeds[1]:.3f}",
                    f"{speed:.2f}",
                    verdict(speed.median, 0.95),
                    f"{times[0]:.1f}",
                    f"{times[1]:.1f}",
                    f"{time:.2f}",
                    verdict(time.median, 1.2, at_most=True),
                )
            )
    header = (
        "over", "message", "raw GB/s", "Transport", "ratio", "goal",
        "raw us there", "Transport", "ratio", "goal",
    )  # fmt: skip
    return Table("Point to point: flows one way; there or back, one at a time", header, lines)


def exposed(work: Work, directory: Path) -> tuple[Table, Any]:
    model = make_wide(directory / "model", **work.changes)
    rows = work.rows * work.microbatches
    data = make_long_rows(directory / "data", rows)
    lines, events = [], {}
    for over, settings in OVER.items():
        metrics = directory / "metrics.jsonl"
        flags = {
            "model": model, "data": data, "fine_tune_type": "full", "num_layers": -1,
            "batch_size": rows, "micro_batch_size": work.rows, "max_seq_length": work.length + 1,
            "iters": 2 * work.steps, "steps_per_report": work.steps, "val_batches": 0,
            "metrics_file": metrics, "adapter_path": directory / "out",
        }  # fmt: skip
        run(mpirun(2, "-m", "shardmlx.train", *as_flags(flags)), settings)
        event = [each for each in events_of(metrics) if each["event"] == "train"][-1]
        events[over] = event
        message = 4 * work.rows * work.length * work.changes["hidden_size"]
        for rank in event["ranks"]:
            share = rank["exposed_comm_seconds"] / event["step_seconds"]
            lines.append(
                (
                    over,
                    size(message),
                    str(rank["rank"]),
                    f"{event['step_seconds']:.3f} s",
                    f"{1e3 * rank['exposed_comm_seconds']:.1f} ms",
                    f"{100 * share:.2f}%",
                    verdict(100 * share, 5, at_most=True),
                )
            )
    header = ("over", "a micro-batch", "rank", "step", "exposed", "of the step", "goal, %")
    return Table("Waiting for messages that are made: 1F1B, two stages", header, lines), events


def actions(work: Work, rounds: int) -> tuple[Table, Any]:
    lines, measured = [], {}
    for ranks, what in ((1, "one rank: F, W"), (2, "two ranks: F, SEND_F, RECV_B, W")):
        result = json.loads(run(mpirun(ranks, HERE / "_actions.py", rounds, work.empty_steps, 16)))
        measured[what] = result
        each = Spread.of([1e6 * seconds / result["actions"] for seconds in result["seconds"]])
        lines.append((what, f"{each:.1f} us", verdict(each.median, 50, at_most=True)))
    return Table("The engine's own time", ("actions", "each", "goal"), lines), measured


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    check_prepared()
    work = QUICK if options.quick else Work()
    rounds = options.rounds or work.rounds
    facts = machine()
    tables, numbers = [], {}
    with tempfile.TemporaryDirectory() as name:
        parts = {
            "link": lambda: links(work, rounds),
            "exposed": lambda: exposed(work, Path(name)),
            "actions": lambda: actions(work, rounds),
        }
        for part in options.only:
            table, numbers[part] = parts[part]()
            tables.append(table)
    publish(options, facts, tables, numbers)


if __name__ == "__main__":
    main()
