#!/usr/bin/env python3
"""What of shardmlx holds on this machine: scripts/first-mac.sh sets up, and runs this."""

from __future__ import annotations

import _root

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

from shardmlx.common.formatting import columns, gibibytes, percent

ROOT = _root.ROOT
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
DATA = ROOT / ".cache" / "pirate"
RANKS = 2
STEPS = 20
TOKENS = 128  # of the longest sequence that is measured; the data's mean is 30

SEND = "Please send this report: the issue template 'It ran' asks for it."


def run(what: str, *words: str | Path) -> tuple[int, str]:
    """Run a step, say how long it took, and return its exit status and the end of its output."""
    print(f"{what} ...", flush=True)
    start = time.monotonic()
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    how = "done" if done.returncode == 0 else f"failed with status {done.returncode}"
    print(f"  {how} in {time.monotonic() - start:.0f} s", flush=True)
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-20:])


def on_ranks(command: str, *words: str | Path) -> list[str | Path]:
    """Return the command line of a command of shardmlx on this machine's ranks."""
    mpirun = Path(sys.executable).with_name("mpirun")
    return [mpirun, "-n", str(RANKS), sys.executable, "-m", f"shardmlx.{command}", *words]


def machine(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a report says of the machine: what it is, not which."""
    host = content["hosts"][0]
    facts = host["facts"]
    yield "chip", str(facts["chip"])
    yield "system", str(facts["system"])
    yield "memory", gibibytes(facts["memory"])
    yield "computes on", str(host["device"])
    yield "GPU may wire", gibibytes(host["working_set"]) if host["working_set"] else "nothing"
    for dtype, flops in host["flops"].items():
        yield f"matmul {dtype}, two ranks", f"{flops / 1e12:.2f} TFLOP/s"
    for package, version in host["versions"].items():
        yield str(package), str(version)
    for each in content["warnings"]:
        yield "warning", str(each["problem"])


def tests(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each test of the device with its outcome."""
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {each.tag for each in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "ok"
        yield str(case.get("name")), outcome


def measured(metrics: Path) -> Iterator[tuple[str, ...]]:
    """Yield memory and time of a run beside the predictions."""
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    reports = [each for each in events if each["event"] == "train"]
    summary = next(each for each in events if each["event"] == "summary")
    expected = summary["predicted"]
    for rank, peak in zip(summary["ranks"], expected["peak_memory_bytes"], strict=True):
        found = rank["peak_memory_bytes"]
        name = f"peak of rank {rank['rank']}"
        yield name, gibibytes(found), gibibytes(peak), percent(found, peak)
    step = fmean(each["step_seconds"] for each in reports[1:])
    planned = expected["step_seconds"]
    yield "step", f"{step:.3f} s", f"{planned:.3f} s", percent(step, planned)
    yield (
        "loss, first and last report",
        *(f"{each['loss']:.4f}" for each in (reports[0], reports[-1])),
        "",
    )


def report(device: str, work: Path) -> tuple[str, bool]:
    """Return the report, and whether all held."""
    parts = ["# What held on this machine"]
    good = True

    def step(what: str, words: Sequence[str | Path]) -> bool:
        nonlocal good
        status, output = run(what, *words)
        if status != 0:
            good = False
            parts.append(f"## {what}: status {status}\n\n```\n{_anonymous(output)}\n```")
        return status == 0

    facts, cases, profile, metrics = (work / name for name in ("doctor", "tests", "profile", "log"))
    if step("Examining the machine", on_ranks("doctor", "--device", device, "--json", facts)):
        rows = list(machine(json.loads(facts.read_text())))
        parts.append("## The machine\n\n```\n" + columns(("", ""), rows) + "\n```")
    pytest = (sys.executable, "-m", "pytest", "-q", "tests/device", "--device", device)
    step("Comparing the device with the CPU", [*pytest, f"--junitxml={cases}"])
    if cases.exists():
        table = columns(("test", "outcome"), list(tests(cases)))
        parts.append(f"## The device beside the CPU\n\n```\n{table}\n```")
    for script, output in (("prepare_smollm2.py", MODEL), ("prepare_pirate_data.py", DATA)):
        step(f"{script}", [sys.executable, f"scripts/{script}", "--output", output])
    how = ("--device", device, "--num-layers", "16", "--max-seq-length", str(TOKENS))
    step("Measuring the layers", on_ranks("profile", MODEL, *how, "-o", profile))
    given: list[str | Path] = ["--model", MODEL, "--data", DATA, "--profile", profile]
    given += ["--adapter-path", work / "adapters", "--metrics-file", metrics]
    given += ["--batch-size", "8", "--iters", str(STEPS), "--steps-per-report", "5"]
    given += ["--val-batches", "0", "--pipeline-stages", str(RANKS)]
    if step("Fine-tuning on two ranks", on_ranks("train", *how, *given)):
        head = ("", "measured", "predicted", "")
        table = columns(head, list(measured(metrics)))
        parts.append(f"## {STEPS} steps of SmolLM2-135M on two ranks\n\n```\n{table}\n```")
    parts.append("All held." if good else "Not all held: see above.")
    return "\n\n".join([*parts, SEND]) + "\n", good


def _anonymous(text: str) -> str:
    """Return a text without this machine's paths."""
    return text.replace(str(ROOT), "shardmlx").replace(str(Path.home()), "~")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--output", type=Path, default=Path("first-mac.md"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        text, good = report(options.device, Path(work))
    options.output.write_text(text, encoding="utf-8")
    print(f"\n{text}\nWrote {options.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
