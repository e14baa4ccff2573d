"""The options of ``shardmlx.profile``: its own, and those of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmlx.common.cli import OneLineParser
from shardmlx.config.specs import BatchOptions, FineTune
from shardmlx.config.train import load_config
from shardmlx.errors import UserError

MEASURED_PARTS = (8, 2, 1)
"""The parts of --max-seq-length that are measured: an eighth of its tokens, a half, and all."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The measurements to make: of a model that is trained so, with micro-batches of ``shapes``,
    each (rows, tokens a row). A rank waits ``timeout`` seconds for another."""

    model: str
    fine_tune: FineTune
    batch: BatchOptions
    timeout: float
    shapes: tuple[tuple[int, int], ...]
    output: Path


def read_options(argv: Sequence[str], rank: int = 0) -> ProfileOptions:
    """Read the flags of this command, and any of ``shardmlx.train``'s. Raises ``UserError``."""
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
        raise UserError(f"--rows is {own.rows}", "give 1 or more")
    shapes = tuple((own.rows, length) for length in _lengths(own.lengths, config.max_seq_length))
    return ProfileOptions(
        model=config.model,
        fine_tune=FineTune.of(config),
        batch=BatchOptions.of(config),
        timeout=config.timeout,
        shapes=shapes,
        output=Path(own.output),
    )


def _lengths(text: str | None, longest: int) -> tuple[int, ...]:
    if text is None:
        lengths = {max(1, longest // part) for part in MEASURED_PARTS}
        return tuple(sorted(lengths))
    try:
        lengths = {int(word) for word in text.split(",")}
    except ValueError:
        lengths = set()
    if not lengths or min(lengths) < 1:
        raise UserError(f"--lengths is {text!r}", "give numbers of tokens, like 128,512")
    return tuple(sorted(lengths))
