"""Measure, by turns and as ratios within one run.

Each benchmark says what it measures, beside what: ``python -m scripts.bench NAME --help``. Results
are in docs/developers/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import SkipTest

from scripts.bench import (
    finetune,
    generation,
    growth,
    own_loop,
    prediction,
    quoting,
    same_curve,
    stages,
)
from scripts.bench.benchmark import Bench, Benchmark, add_common_options, machine, write_report
from testbed.jobs import ROOT

TABLE: tuple[Benchmark, ...] = (
    stages.PIPELINE,
    finetune.FINETUNE,
    generation.GENERATION,
    quoting.QUOTING_TASKS,
    prediction.PREDICTION,
    same_curve.SAME_CURVE,
    own_loop.OWN_LOOP,
    growth.GROWTH,
)
"""All benchmarks."""


def parser_of_all() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a command for each benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for each in TABLE:
        own = commands.add_parser(
            each.name,
            help=" ".join(each.about.partition("\n\n")[0].split()),
            description=each.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        each.options(own)
        add_common_options(own, each.rounds)
    return parser


def run(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Run a benchmark. ``SystemExit`` where this machine lacks what it needs."""
    for lacking in benchmark.needs:
        if lacks := lacking():
            raise SystemExit(lacks)
    facts = machine()
    rounds = options.rounds or (1 if options.quick else benchmark.rounds)
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    # Not in /tmp, of which each host of a lab has its own.
    with tempfile.TemporaryDirectory(prefix="bench-", dir=cache) as directory:
        bench = Bench(options, rounds, Path(directory))
        try:
            benchmark.work(bench)
        except SkipTest as error:
            raise SystemExit(str(error)) from None
    write_report(bench, facts)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of_all().parse_args(arguments)
    (benchmark,) = [each for each in TABLE if each.name == options.name]
    run(benchmark, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
