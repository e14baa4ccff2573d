"""An export on one rank, in this process."""

from __future__ import annotations

from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.command import export
from tests.helpers.local_transport import LocalNetwork


def export_alone(options: ExportOptions) -> None:
    LocalNetwork(1).run(lambda transport: export(options, transport, Reporter(quiet=True)))
