"""Plan the training of a model on given machines: ``shardmlx plan MODEL --hostfile FILE``.

It needs neither MLX nor MPI, and of the model only the headers, or config.json alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardmlx.common.cli import run_command
from shardmlx.planning.plan_command import run
from shardmlx.planning.plan_options import read_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on stderr for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(*read_options(given)))


if __name__ == "__main__":
    raise SystemExit(main())
