"""What soak tests and fuzz.py share: options, a small model, what happened and what went wrong."""

from __future__ import annotations

import _root

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from shardmlx.common.formatting import columns


def parser_of(doc: str, *, seed: int = 0) -> argparse.ArgumentParser:
    """Return a parser with the option that all have; ``doc`` is the module's."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help = "of all random choices (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=seed, help=help)
    return parser


def small_model(root: Path) -> tuple[Path, Path]:
    """Write a small model and real chat data; return both directories."""
    from testbed.small_models import pirate_directory, small_directory, tokenizer_directory

    data = pirate_directory(root / "data", root / "whole")
    return small_directory(root / "model", tokenizer_directory(root / "tokenizer", data)), data


@dataclass
class Record:
    """What happened, and how often; and what must not happen, each as it was found."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        """Note a fault, and say it at once."""
        self.faults.append(what)
        print(what, file=sys.stderr, flush=True)

    def show(self) -> None:
        """Print what happened, and how many faults there were."""
        lines = [*sorted(self.counts.items()), ("faults", len(self.faults))]
        print(columns(("what", "count"), [(what, str(count)) for what, count in lines]), flush=True)
