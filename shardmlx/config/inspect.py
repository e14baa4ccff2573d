"""The options of ``shardmlx.inspect``. No MLX, no MPI."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.common.cli import OneLineParser
from shardmlx.errors import UserError

DEFAULT_PARTITIONER = "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """The model to look at, how it is to be divided, and what is to be shown of it."""

    model: str
    revision: str | None
    all_layers: bool
    stages: int | None
    partitioner: str | None
    stage_map: str | None
    hosts: str | None
    rank: int | None
    context: int | None
    sequences: int
    json: bool
    verify: bool

    def __post_init__(self) -> None:
        if self.verify:
            return
        if self.stages is not None and self.stages < 1:
            raise UserError(f"--stages {self.stages}", "give 1 or more")
        if self.stage_map is not None and self.partitioner is not None:
            raise UserError("--partitioner divides anew, but --stage-map is given", "leave one out")
        for flag in ("rank", "partitioner", "context"):
            if getattr(self, flag) is not None and not self.divides:
                raise UserError(f"--{flag} needs a split", "give --stages, --stage-map or --hosts")

    @property
    def divides(self) -> bool:
        """True if the model is to be divided into stages."""
        return any(each is not None for each in (self.stages, self.stage_map, self.hosts))


def read_options(argv: Sequence[str] | None) -> InspectOptions:
    """Return the options in ``argv``, by default this process's; ``UserError`` for bad ones."""
    return InspectOptions(**vars(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m shardmlx.inspect",
        description="Show what a model consists of, from the headers of its files alone.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory, .safetensors file, or Hugging Face repository (OWNER/NAME)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a repository")
    parser.add_argument("--all-layers", action="store_true", help="a line for every layer")
    split = parser.add_argument_group("split")
    split.add_argument("--stages", type=int, metavar="N", help="divide into N pipeline stages")
    split.add_argument(
        "--partitioner",
        metavar="NAME",
        help=f"how --stages divides (default: {DEFAULT_PARTITIONER})",
    )
    split.add_argument("--stage-map", metavar="FILE", help="divide as this file says")
    split.add_argument(
        "--hosts", metavar="HOSTFILE", help="the machines; without --stages as many as it has slots"
    )
    split.add_argument(
        "--rank", type=int, metavar="R", help="tensors, files and byte ranges that this rank needs"
    )
    split.add_argument(
        "--context",
        type=int,
        metavar="T",
        help="count the memory of generating texts of T tokens, prompt included, too",
    )
    split.add_argument(
        "--sequences", type=int, default=1, metavar="N", help="texts at once (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="all of it as JSON")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="look for what is wrong with the files; status 1 if something is",
    )
    return parser
