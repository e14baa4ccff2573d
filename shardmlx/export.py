"""Writes a finished model, one tensor at a time: ``python -m shardmlx.export MODEL -o DIR``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardmlx.common.cli import INTERRUPTED
from shardmlx.common.environment import Blas
from shardmlx.config.export import ExportOptions, load_config
from shardmlx.distributed.run_ranks import run_ranks

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on this rank, and return its exit status: 0, 1 where ``--verify`` finds a
    fault, or 2 after bad input. A failure at run time ends all ranks."""
    given = sys.argv[1:] if argv is None else argv
    try:
        return run_ranks(lambda rank: load_config(given, rank), lambda o: o.timeout, _load)
    except KeyboardInterrupt:  # before anything is begun
        return INTERRUPTED


def _load() -> Callable[[ExportOptions, Transport, Blas], None]:
    from shardmlx.conversion.command import run

    return run


if __name__ == "__main__":
    raise SystemExit(main())
