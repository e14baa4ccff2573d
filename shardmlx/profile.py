"""``[mpirun -n N] python -m shardmlx.profile MODEL``: measure what a layer takes on each machine.

The planner, and the partitioners ``profiled`` and ``hetero``, then count in seconds instead of
FLOPs. Ranks measure at the same time, so that those that share a machine slow one another as they
do in a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardmlx.common.cli import OneLineParser
from shardmlx.common.environment import Blas
from shardmlx.config.train import TrainConfig, load_config
from shardmlx.distributed.run_ranks import run_ranks
from shardmlx.errors import UserError

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport

MEASURED_PARTS = (8, 2, 1)
"""Sequences of --max-seq-length tokens divided by these are measured."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure: a training run's options, and micro-batches of (rows, tokens a row)."""

    config: TrainConfig
    shapes: tuple[tuple[int, int], ...]
    output: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after bad input. A failure at run time ends all ranks."""
    given = sys.argv[1:] if argv is None else argv
    return run_ranks(
        lambda rank: read_options(given, rank), lambda options: options.config.timeout, _load
    )


def read_options(argv: Sequence[str], rank: int = 0) -> ProfileOptions:
    """Flags of this command, and any of ``shardmlx.train``'s."""
    parser = OneLineParser(
        rank=rank,
        prog="python -m shardmlx.profile",
        description="Measure how long each part of a model takes on each machine, for the planner.",
        epilog="Takes every option of shardmlx.train too: they say what is trained, and how.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="model directory, or Hugging Face repository"
    )
    parser.add_argument(
        "-o", "--output", default="profile.json", metavar="FILE", help="(default: profile.json)"
    )
    parser.add_argument(
        "--rows", type=int, default=1, metavar="R", help="sequences a micro-batch (default: 1)"
    )
    parser.add_argument(
        "--lengths",
        metavar="T,T",
        help="tokens a sequence (default: an eighth, a half and all of --max-seq-length)",
    )
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        raise UserError("give the MODEL first (see --help)")
    own, rest = parser.parse_known_args(argv)
    config = load_config(["--model", own.model, *rest], rank)
    if own.rows < 1:
        raise UserError(f"--rows is {own.rows}: give 1 or more")
    shapes = tuple((own.rows, length) for length in _lengths(own.lengths, config))
    return ProfileOptions(config, shapes, Path(own.output))


def _lengths(text: str | None, config: TrainConfig) -> tuple[int, ...]:
    if text is None:
        lengths = {max(1, config.max_seq_length // part) for part in MEASURED_PARTS}
        return tuple(sorted(lengths))
    try:
        lengths = {int(word) for word in text.split(",")}
    except ValueError:
        lengths = set()
    if not lengths or min(lengths) < 1:
        raise UserError(f"--lengths is {text!r}: give numbers of tokens, like 128,512")
    return tuple(sorted(lengths))


def _load() -> Callable[[ProfileOptions, Transport, Blas], None]:
    from shardmlx.training.profiling import run

    return lambda options, *rest: run(options.config, options.shapes, options.output, *rest)


if __name__ == "__main__":
    raise SystemExit(main())
