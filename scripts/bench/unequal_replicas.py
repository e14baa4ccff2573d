#!/usr/bin/env python3
"""Measure two replicas of which one has half a core: rows by speed beside equal rows.

    python scripts/bench/unequal_replicas.py [--rounds N] [--json FILE]

Hosts are network namespaces, each in a cgroup with its share of a core (root, Linux). Both are
measured by shardmlx profile; then the same model is trained with equal rows and with
--replica-rows auto, by turns. What can be gained is (s1 + s2) / (2 s2), where s1 and s2 are the
rows that each computes in a second, as the run with equal rows has measured them.

Five minutes on two cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _compare import ROOT, Table, machine, parser_of, publish, run, verdict
from _models import check_prepared, make_long_rows, make_wide
from _training import as_flags, events_of

sys.path.insert(0, str(ROOT))

from testbed.cgroups import cpu_cgroups
from testbed.hosts import Lab, hosts, missing

CORES = {"mac1": 1.0, "mac2": 0.5}
GOAL = 0.95
ROWS = 12


@dataclass(frozen=True)
class Work:
    rounds: int = 3
    steps: int = 6
    length: int = 128


QUICK = Work(rounds=1, steps=3, length=32)


def train(lab: Lab, flags: dict[str, object], name: str) -> dict[str, Any]:
    """Return median seconds of a step, of what each rank computes, losses, and rows."""
    metrics = lab.home(lab.hosts[0]) / f"{name}.jsonl"
    metrics.unlink(missing_ok=True)
    files = {"metrics_file": metrics.name, "adapter_path": name}
    run(lab.mpirun(2, "-m", "shardmlx.train", *as_flags({**flags, **files})))
    events = events_of(metrics)
    steps = [each for each in events if each["event"] == "train"]
    return {
        "seconds": statistics.median(each["step_seconds"] for each in steps[1:]),
        "computed": [
            statistics.median(each["ranks"][rank]["compute_seconds"] for each in steps[1:])
            for rank in (0, 1)
        ],
        "losses": [each["loss"] for each in steps],
    }


def measure(work: Work, rounds: int, directory: Path) -> list[dict[str, Any]]:
    model, data = make_wide(directory / "model"), make_long_rows(directory / "data")
    common = {
        "model": model, "data": data, "fine_tune_type": "full", "num_layers": -1,
        "max_seq_length": work.length + 1, "batch_size": ROWS, "pipeline_stages": 1,
        "micro_batch_size": 1, "iters": work.steps, "steps_per_report": 1, "val_batches": 0,
        "optimizer": "sgd", "no-pack": True, "recompute": "none",
    }  # fmt: skip
    kept = ("fine_tune_type", "num_layers", "max_seq_length", "optimizer")
    with (
        cpu_cgroups(CORES) as cgroups,
        tempfile.TemporaryDirectory() as name,
        hosts(Path(name), 2, cgroups=cgroups) as lab,
    ):
        profile = {**{key: common[key] for key in kept}, "output": "profile"}
        run(lab.mpirun(2, "-m", "shardmlx.profile", model, *as_flags(profile)))
        found = []
        for _ in range(rounds):
            equal = train(lab, common, "equal")
            by_speed = {**common, "replica_rows": "auto", "profile": "profile"}
            found.append({"equal": equal, "by speed": train(lab, by_speed, "auto")})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def line_of(found: dict[str, Any]) -> tuple[float, float, float]:
    """Return what was gained, what can be, and by how much the losses differ."""
    equal, other = found["equal"], found["by speed"]
    fast, slow = equal["computed"]
    pairs = zip(equal["losses"], other["losses"], strict=True)
    apart = max(abs(a - b) / a for a, b in pairs)
    return equal["seconds"] / other["seconds"], (slow / fast + 1) / 2, apart


def main() -> None:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    if lacks := missing():
        raise SystemExit(lacks)
    check_prepared()
    work = QUICK if options.quick else Work()
    facts = machine()
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="unequal-") as name:
        measured = measure(work, options.rounds or work.rounds, Path(name))
    lines = [line_of(each) for each in measured]
    gained = statistics.median(gain / ideal for gain, ideal, _ in lines)
    rows = [[f"{gain:.3f}", f"{ideal:.3f}", f"{gain / ideal:.3f}"] for gain, ideal, _ in lines]
    rows.append(["median", "", f"{gained:.3f} ({verdict(gained, GOAL)})"])
    apart = max(apart for _, _, apart in lines)
    table = Table(
        f"One replica at half a core: rows by speed (losses within {apart:.0e})",
        ("equal rows / by speed", "(s1 + s2) / (2 s2)", "share"),
        rows,
    )
    publish(options, facts, [table], {"rounds": measured})


if __name__ == "__main__":
    main()
