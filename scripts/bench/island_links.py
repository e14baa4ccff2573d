#!/usr/bin/env python3
"""How long islands wait for a hub behind links of 20 Mbit/s and 50 ms, and what goes over them;
and how long two replicas wait for each other.

    python scripts/bench/island_links.py [--only WORD ...] [--steps 100] [--json FILE]

Two islands, a process each, train all of an 8-layer, 128-wide model, 1.7M weights, a row of 32
tokens; each has a link of its own. A step whose sums or reports cross such a link each time waits
for them; an island that reports every 100 steps waits less, and not at all if it trains on
meanwhile. Shares are of an island's own time after its first step. The planned bytes are those of
all reports and all weights, by the protocol.

Data parallel is one job, a row a replica: its hosts are network namespaces (root, Linux) with such
a link between them, and its bytes what they send, headers too. It is beside islands that report
each step.

Six minutes on two cores.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _compare import ROOT, Table, machine, parser_of, publish, run
from _islands import running_hub, train_islands
from _models import check_prepared, make_long_rows, make_wide, of_width
from _slow_link import SlowLink
from _training import as_flags, events_of

sys.path.insert(0, str(ROOT))

from shardmlx.islands.encodings import encoding_named
from shardmlx.islands.store import Run
from testbed.hosts import Lab, hosts, missing

RATE, DELAY = 20e6 / 8, 0.05
NAMES = ("ann", "bob")
CLOCK = ROOT / "scripts/bench/_island.py"

TRAINING = {
    "fine_tune_type": "full", "num_layers": -1, "optimizer": "adam",
    "batch_size": 1, "max_seq_length": 33, "val_batches": 0,
    "save_every": 10**9, "recompute": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A run: what the hub asks of islands, beside ``inner_steps``; and how many rounds it has."""

    terms: dict[str, object]
    rounds: int = 2
    every: int | None = None


KINDS = {
    "each step": Kind({"outer_optimizer": "sgd"}, rounds=8, every=1),
    "each 100 steps": Kind({}),
    "the same, 4 fragments, --overlap 40": Kind({"fragments": 4, "overlap": 40}),
    "the same, --encoding int8": Kind({"fragments": 4, "overlap": 40, "encoding": "int8"}),
}

TOGETHER, MOST_TOGETHER = "data parallel", 8
SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def measure(kind: Kind, steps: int, model: Path, data: Path) -> dict[str, Any]:
    """Return the clock of each island, the bytes of its link, and those that were planned."""
    every = kind.every or steps
    # What is reported last arrives before the last step.
    iters = 1 + kind.rounds * every + int(str(kind.terms.get("overlap", 0)))
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "hub")
        flags: dict[str, dict[str, object]] = {
            name: {
                **TRAINING, "model": model, "data": data, "iters": iters,
                "adapter_path": Path(made, name),
            }
            for name in NAMES
        }  # fmt: skip
        with running_hub(path, NAMES, inner_steps=every, **kind.terms) as port:
            links = {name: SlowLink(port, RATE, DELAY) for name in NAMES}
            ports = {name: link.port for name, link in links.items()}
            train_islands(path, ports, flags, [CLOCK])
        with closing(Run(path, [], None)) as run:
            planned = planned_bytes(run, iters)
        return {
            "clocks": [json.loads(Path(made, name, "clock.json").read_text()) for name in NAMES],
            "bytes": sum(sum(link.bytes.values()) for link in links.values()),
            "planned_bytes": planned,
        }


def measure_together(steps: int, model: Path, data: Path) -> dict[str, Any]:
    """Return the clock of each replica, and the bytes of the link between them."""
    line = (sys.executable, ROOT / "scripts/bench/_late_line.py", str(DELAY))
    rate = f"{8 * RATE / 1e6:g}mbit"
    with tempfile.TemporaryDirectory() as made, hosts(Path(made), 2, rate=rate, line=line) as lab:
        for host in lab.hosts:
            shutil.copytree(model, lab.home(host) / "model")
            shutil.copytree(data, lab.home(host) / "data")
        flags = {
            **TRAINING, "model": "model", "data": "data", "batch_size": 2, "pipeline_stages": 1,
            "iters": 1 + min(steps, MOST_TOGETHER), "steps_per_report": 1, "adapter_path": "out",
            "metrics_file": "metrics.jsonl", "zero": 0,
        }  # fmt: skip
        before = sent_bytes(lab)
        run(lab.mpirun(2, "-m", "shardmlx.train", *as_flags(flags)), timeout=500)
        sent = sent_bytes(lab) - before
        events = events_of(lab.home("mac1") / "metrics.jsonl")
    made_steps = [each for each in events if each["event"] == "train"][1:]
    seconds = sum(each["step_seconds"] for each in made_steps)
    clocks = []
    for rank in range(2):
        waited = sum(each["ranks"][rank]["exposed_comm_seconds"] for each in made_steps)
        of_rank = {"seconds": seconds, "waited": waited, "worked": 0.0, "steps": len(made_steps)}
        clocks.append(of_rank)
    return {"clocks": clocks, "bytes": sent}


def sent_bytes(lab: Lab) -> int:
    counters = (lab.command(host, "cat", SENT) for host in lab.hosts)
    return sum(int(subprocess.check_output(each)) for each in counters)


def planned_bytes(run: Run, steps: int) -> int:
    """Return the bytes of the weights that the first island gives and the others take, of all
    reports, and of what comes back."""
    total = 0
    for k, each in enumerate(run.fragments):
        whole, report = each.seed_bytes, each.report_bytes
        is_lossy = encoding_named(run.terms.encoding).is_lossy
        reports = sum(k in run.terms.due(step) for step in range(1, steps + 1))
        back = report if is_lossy else whole
        total += len(NAMES) * (whole + reports * (report + back))
    return total


def cells(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return a line of the table, of the island that waited most."""
    clock = max(found["clocks"], key=waits)
    own, planned = clock["seconds"] - clock["waited"] - clock["worked"], found.get("planned_bytes")
    return (
        name,
        f"{own / clock['steps']:.2f} s",
        f"{100 * waits(clock):.1f}%",
        f"{100 * clock['worked'] / clock['seconds']:.1f}%",
        f"{100 * own / clock['seconds']:.1f}%",
        f"{found['bytes'] / 1e6:.1f} MB",
        f"{100 * (found['bytes'] / planned - 1):+.1f}%" if planned else "",
    )


def waits(clock: dict[str, float]) -> float:
    return clock["waited"] / clock["seconds"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of which a run has one")
    parser.add_argument("--steps", type=int, default=100, help="steps between two reports")
    options = parser.parse_args()
    check_prepared()
    facts, lines, results = machine(), [], []
    with tempfile.TemporaryDirectory() as made:
        model = make_wide(Path(made, "model"), **of_width(128))
        data = make_long_rows(Path(made, "data"))
        measures: dict[str, Callable[[int, Path, Path], dict[str, Any]]] = {
            name: partial(measure, kind) for name, kind in KINDS.items()
        }
        if lacks := missing():
            print(f"no {TOGETHER}: {lacks}", file=sys.stderr)
        else:
            measures = {TOGETHER: measure_together, **measures}
        for name, measured in measures.items():
            if not options.only or any(word in name for word in options.only):
                found = measured(options.steps, model, data)
                results.append({"kind": name, **found})
                lines.append(cells(name, found))
                print("  ".join(lines[-1]), flush=True)
    header = ("reports", "a step computes", "it waits", "encodes, merges", "computes")
    table = Table("Two islands, or replicas", (*header, "bytes", "beside the plan"), lines)
    publish(options, facts, [table], {"links": results})


if __name__ == "__main__":
    main()
