"""Plan the training of a model on given machines, or show a schedule: ``python -m shardmlx.plan``.

It needs neither MLX nor MPI, and of the model only the headers, or config.json alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardmlx.common.cli import run_command
from shardmlx.planning.plan_command import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on stderr for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(given))


if __name__ == "__main__":
    raise SystemExit(main())
