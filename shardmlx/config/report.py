"""The options of ``shardmlx.report``. No MLX, no MPI."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmlx.common.cli import OneLineParser
from shardmlx.errors import UserError

PAGES = (".html", ".htm")
PICTURES = (".svg", ".png")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The metrics to report, and the file to write, whose suffix says what it is."""

    metrics: str
    output: str | None

    def __post_init__(self) -> None:
        suffix = self.file.suffix.lower()
        if suffix not in (*PAGES, *PICTURES):
            raise UserError(
                f"--output {self.output}: the suffix is none of .html, .svg, .png", "use one"
            )
        if self.file.resolve() == Path(self.metrics).resolve():
            raise UserError(f"--output {self.file} is the metrics file itself", "name another file")

    @property
    def file(self) -> Path:
        """The file to write: by default a page beside the metrics."""
        if self.output is None:
            return Path(self.metrics).with_suffix(".html")
        return Path(self.output)

    @property
    def is_picture(self) -> bool:
        """True if a picture of the curves is wanted, not the page."""
        return self.file.suffix.lower() in PICTURES


def read_options(argv: Sequence[str] | None) -> ReportOptions:
    """Return the options in ``argv``, by default this process's; ``UserError`` for bad ones."""
    return ReportOptions(**vars(build_parser().parse_args(argv)))


def build_parser() -> argparse.ArgumentParser:
    """Build the command line of ``shardmlx.report``."""
    parser = OneLineParser(
        prog="python -m shardmlx.report",
        description="Show a training run from its metrics, as one HTML file that needs no network, "
        "or its curves as a picture.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "metrics", metavar="METRICS", help="file that train --metrics-file wrote, or still writes"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="page (.html) or picture of the curves (.svg, .png) to write "
        "(default: METRICS with .html for its suffix)",
    )
    return parser
