"""An export in this process."""

from __future__ import annotations

from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.export import export


def export_alone(options: ExportOptions) -> None:
    export(options, Reporter(quiet=True))
