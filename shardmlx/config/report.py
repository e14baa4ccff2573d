"""The options of ``shardmlx report``. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import REQUIRED, OptionError, check_options, option

PAGES = (".html", ".htm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The metrics to report, and the page to write.

    Raises ``OptionError``, a ``UserError``.
    """

    metrics: str = option(
        REQUIRED,
        "file that train --metrics-file wrote, or still writes",
        metavar="METRICS",
        positional=True,
    )
    output: str | None = option(
        None,
        "page (.html) to write",
        metavar="FILE",
        unset="METRICS with .html for its suffix",
        short="-o",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.file.suffix.lower() not in PAGES:
            raise OptionError("output", f"is {self.file}", "give it the suffix .html")
        if self.file.resolve() == Path(self.metrics).resolve():
            raise OptionError("output", f"is the metrics file {self.file}", "name another file")

    @property
    def file(self) -> Path:
        """The file to write: by default a page beside the metrics."""
        if self.output is None:
            return Path(self.metrics).with_suffix(".html")
        return Path(self.output)


LINE = CommandLine(
    options=ReportOptions,
    command="report",
    description="Show a training run from its metrics, as one HTML file that needs no network.",
)
