"""Shows what a pipeline schedule does: ``shardmlx schedule``.

It needs neither MLX nor MPI, and no model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardmlx.common.cli import run_command
from shardmlx.config.schedule import ScheduleOptions, read_options
from shardmlx.pipeline.report import show_schedule


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on stderr for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(read_options(given)))


def run(options: ScheduleOptions) -> int:
    """Print the schedule as the options say; return 0. Raises ``UserError``."""
    print(
        show_schedule(
            options.schedule,
            options.pipeline_stages,
            options.micro_batches,
            virtual=options.virtual_stages,
            costs=options.costs,
            draw=options.draw,
            form="json" if options.json else options.print,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
