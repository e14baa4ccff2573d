"""Show a training run from its metrics file: ``shardmlx report METRICS``.

It needs neither MLX nor MPI: any machine can make the page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardmlx.common.cli import run_command
from shardmlx.config.report import read_options
from shardmlx.runreport.command import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on stderr for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(read_options(given)))


if __name__ == "__main__":
    raise SystemExit(main())
