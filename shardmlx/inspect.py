"""Shows what a model consists of, from headers alone: ``python -m shardmlx.inspect MODEL``.

Neither MLX nor MPI is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmlx.common.cli import run_command
from shardmlx.config.inspect import read_options
from shardmlx.planning.inspection import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 when ``--verify`` finds something, 2 after bad input."""
    return run_command(lambda: run(read_options(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
