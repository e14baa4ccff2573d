"""What messages cost: on a link, in a step, and in the engine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.benchmark import Bench, Benchmark, Spread, program, run, verdict
from scripts.bench.trained import FULL, demo_lacks, make_long_rows, make_wide, of_kind, trained
from testbed.jobs import ranks_command

OVER = {
    "shared memory": {"OMPI_MCA_btl": "sm,self", "OMPI_MCA_pml": "ob1"},
    "TCP": {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": "lo"},
}
"""Settings of Open MPI that decide which way messages go."""


@dataclass(frozen=True)
class Work:
    """Sizes of messages, and the runs in which they are sent."""

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
    sizes=(4, 1 << 20),
    rows=4,
    length=64,
    microbatches=2,
    changes={"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512},
    steps=1,
    empty_steps=5,
)


def size(nbytes: int) -> str:
    """Return bytes in the largest unit that fits."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def show_links(bench: Bench, work: Work) -> None:
    """Show Transport beside raw MPI."""
    command = ranks_command(2, *program("message_ranks", "link", bench.rounds, *work.sizes))
    measured = {over: json.loads(run(command, settings)) for over, settings in OVER.items()}
    bench.keep(link=measured)
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
    bench.show("Point to point: flows one way; there or back, one at a time", header, lines)


def show_exposed(bench: Bench, work: Work) -> None:
    """Show how long ranks wait for messages in a step of two stages."""
    model = make_wide(bench.directory / "model", **work.changes)
    rows = work.rows * work.microbatches
    data = make_long_rows(bench.directory / "data", rows)
    message = size(4 * work.rows * work.length * work.changes["hidden_size"])
    flags = {
        **FULL, "model": model, "data": data, "batch_size": rows, "micro_batch_size": work.rows,
        "pipeline_stages": 2, "max_seq_length": work.length + 1, "iters": 2 * work.steps,
        "steps_per_report": work.steps,
    }  # fmt: skip
    lines = []
    for over, settings in OVER.items():
        event = of_kind(trained(bench, over, flags, variables=settings), "train")[-1]
        bench.keep(**{f"exposed, {over}": event})
        for rank in event["ranks"]:
            exposed = rank["exposed_comm_seconds"]
            share = 100 * exposed / event["step_seconds"]
            lines.append(
                (
                    over,
                    message,
                    str(rank["rank"]),
                    f"{event['step_seconds']:.3f} s",
                    f"{1e3 * exposed:.1f} ms",
                    f"{share:.2f}%",
                    verdict(share, 5, at_most=True),
                )
            )
    header = ("over", "a micro-batch", "rank", "step", "exposed", "of the step", "goal, %")
    bench.show("Waiting for messages that are made: 1F1B, two stages", header, lines)


def show_actions(bench: Bench, work: Work) -> None:
    """Show what the engine itself takes for an action."""
    lines = []
    for ranks, what in ((1, "one rank: F, W"), (2, "two ranks: F, SEND_F, RECV_B, W")):
        words = program("message_ranks", "actions", bench.rounds, work.empty_steps, 16)
        result = json.loads(run(ranks_command(ranks, *words)))
        bench.keep(**{what: result})
        each = Spread.of([1e6 * seconds / result["actions"] for seconds in result["seconds"]])
        lines.append((what, f"{each:.1f} us", verdict(each.median, 50, at_most=True)))
    bench.show("The engine's own time", ("actions", "each", "goal"), lines)


PARTS = {"link": show_links, "exposed": show_exposed, "actions": show_actions}


def messages(bench: Bench) -> None:
    """What messages cost: Transport beside raw MPI, waits in a step, the engine's own time.

      link      two ranks of this machine, over shared memory and over TCP on its loopback: messages
                of 4 bytes to 64 MiB by mpi4py's Send and Recv, Isend, Irecv and Waitall, and by
                Transport, in the same process, by turns, out of the same buffers
      exposed   shardmlx.train with two stages that pass each other 64 MiB a micro-batch, over TCP
                and over shared memory: how long ranks wait for messages that are already made
      actions   the engine with stages that do nothing, alone and with messages of 256 bytes

    About five minutes on two cores.
    """
    for show in bench.chosen(PARTS).values():
        show(bench, QUICK if bench.quick else Work())


MESSAGES = Benchmark("messages", messages, rounds=9, needs=[demo_lacks])
