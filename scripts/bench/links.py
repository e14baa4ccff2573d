#!/usr/bin/env python3
"""How far predictions are from what is measured between two hosts: time of a step, and memory.

    python scripts/bench/links.py [--rates 100mbit 200mbit] [--only WORD ...] [--json FILE]

Hosts are network namespaces whose links are limited in both directions (root, Linux). A model of 8
layers and width 512, all of it trained in float32 with AdamW, steps of 16 rows of 128 tokens:
replicas that divide nothing, the optimizer, or the weights, sums in 16 and in 8 bits, and two
stages. shardmlx.profile measures on both hosts at once; the hostfile has what a link carries beside
the headers, as shardmlx.doctor would write it.

A quarter of an hour on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from _compare import ROOT, Table, machine, parser_of, publish, run
from _models import check_prepared, make_long_rows, make_wide
from _training import as_flags, events_of
from sums import bytes_a_second

sys.path.insert(0, str(ROOT))

from shardmlx.common.units import MIB
from testbed.hosts import Lab, hosts, missing

PAYLOAD = 1448 / 1514
"""Part of a full packet that is not headers of Ethernet, IP and TCP."""

REPLICAS = {"pipeline_stages": 1}
STAGES = {"pipeline_stages": 2, "schedule": "1f1b"}
KINDS: dict[str, dict[str, Any]] = {
    "--zero 0": {**REPLICAS, "zero": 0},
    "--zero 1": {**REPLICAS, "zero": 1},
    "--zero 1 --sum-dtype bfloat16": {**REPLICAS, "zero": 1, "sum_dtype": "bfloat16"},
    "--zero 1 --sum-dtype int8": {**REPLICAS, "zero": 1, "sum_dtype": "int8"},
    "--zero 3": {**REPLICAS, "zero": 3},
    "two stages, 1f1b": STAGES,
}

LENGTH, ROWS = 128, 2
"""Tokens of a row, and rows of a micro-batch."""

TRAINING = {
    "data": "data", "fine_tune_type": "full", "num_layers": -1, "optimizer": "adamw",
    "batch_size": 8 * ROWS, "micro_batch_size": ROWS, "max_seq_length": LENGTH + 1,
    "recompute": "none", "config": "whole.yaml",
}  # fmt: skip

PINNED = ("sh", "-c", 'exec taskset --cpu-list "$OMPI_COMM_WORLD_RANK" "$0" "$@"')
"""A core for each host: else the kernel moves processes between those of this machine."""


def run_on_both(lab: Lab, *arguments: object) -> None:
    command = lab.mpirun(2, "-m", *map(str, arguments))
    program = command.index(sys.executable)
    run([*command[:program], *PINNED, *command[program:]], timeout=500)


def prepare(lab: Lab, rate: str) -> None:
    """Write the model, data, options and hostfile, and measure a profile."""
    link = f"link={bytes_a_second(rate) * PAYLOAD / 1e6:.2f}MB/s latency=100us"
    lines = "".join(f"{host} slots=1 # {link}\n" for host in lab.hosts)
    (lab.home("mac1") / "hosts").write_text(lines)
    (lab.home("mac1") / "whole.yaml").write_text("attention_chunk: off\nloss_chunk: off\n")
    for host in lab.hosts:
        make_wide(lab.home(host) / "model")
        make_long_rows(lab.home(host) / "data")
    measured = {"output": "profile.json", "rows": ROWS, "lengths": f"{LENGTH // 2},{LENGTH}"}
    run_on_both(lab, "shardmlx.profile", "model", *as_flags({**TRAINING, **measured}))


def measure(lab: Lab, kind: str, steps: int) -> dict[str, Any]:
    """Return what a run has taken, and what it had predicted of itself."""
    metrics = lab.home("mac1") / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    more = {
        "model": "model", "profile": "profile.json", "hostfile": "hosts", "iters": steps + 1,
        "steps_per_report": 1, "val_batches": 0, "adapter_path": "out",
        "metrics_file": metrics.name,
    }  # fmt: skip
    run_on_both(lab, "shardmlx.train", *as_flags({**TRAINING, **KINDS[kind], **more}))
    events = events_of(metrics)
    summary = events[-1]
    return {
        "seconds": [each["step_seconds"] for each in events if each["event"] == "train"][1:],
        "predicted_seconds": summary["predicted"]["step_seconds"],
        "peaks": [each["peak_memory_bytes"] for each in summary["ranks"]],
        "predicted_peaks": summary["predicted"]["peak_memory_bytes"],
    }


def cells(rate: str, kind: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return a line of the table; whatever disturbs a machine makes a step slower."""
    seconds, predicted = min(found["seconds"]), found["predicted_seconds"]
    peak, expected = max(found["peaks"]), max(found["predicted_peaks"])
    return (
        rate,
        kind,
        f"{predicted:.2f} s",
        f"{seconds:.2f} s",
        f"{100 * (predicted / seconds - 1):+.1f}%",
        f"{expected / MIB:.0f} MiB",
        f"{peak / MIB:.0f} MiB",
        f"{100 * (expected / peak - 1):+.1f}%",
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", nargs="*", default=["100mbit", "200mbit"])
    parser.add_argument(
        "--only", nargs="*", default=list(KINDS), help="words of which a run has one"
    )
    options = parser.parse_args()
    if lacks := missing():
        raise SystemExit(lacks)
    check_prepared()
    facts, steps = machine(), options.rounds or (1 if options.quick else 4)
    lines, results = [], []
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as name, hosts(Path(name), 2, rate=rate) as lab:
            prepare(lab, rate)
            for kind in KINDS:
                if any(word in kind for word in options.only):
                    found = measure(lab, kind, steps)
                    results.append({"rate": rate, "kind": kind, **found})
                    lines.append(cells(rate, kind, found))
                    print("  ".join(lines[-1]), flush=True)
    header = ("link", "run", "step predicted", "measured", "error", "peak predicted", "measured")
    publish(options, facts, [Table("Two hosts", (*header, "error"), lines)], {"links": results})


if __name__ == "__main__":
    main()
