"""Runs a command under mpirun, and again if it fails: ``python -m shardmlx.launch ... train ...``.

It needs neither MLX nor MPI itself, and belongs on the machine of rank 0, where checkpoints are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardmlx.common.cli import run_command
from shardmlx.hosts.launch_options import read_options
from shardmlx.hosts.launcher import run


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done; 1 given up; 2 bad input; 128 + n after signal n."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(read_options(given)))


if __name__ == "__main__":
    raise SystemExit(main())
