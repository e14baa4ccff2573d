"""Plan the training of a model on given machines: ``shardmlx plan MODEL --hostfile FILE``.

It needs neither MLX nor MPI, and of the model only the headers, or config.json alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardmlx import schedule
from shardmlx.common.cli import run_command
from shardmlx.planning.plan_command import run
from shardmlx.planning.plan_options import read_options

_OF_SCHEDULE = "--micro-batches"
"""The flag that only ``shardmlx schedule`` takes, whose work this command did."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on stderr for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] == _OF_SCHEDULE for word in given):
        print("shardmlx: schedules are shown by shardmlx schedule now", file=sys.stderr)
        return schedule.main(given)
    return run_command(lambda: run(*read_options(given)))


if __name__ == "__main__":
    raise SystemExit(main())
