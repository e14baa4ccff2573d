"""Measure what a layer takes on each machine: ``[mpirun -n N] python -m shardmlx.profile MODEL``.

The planner and the partitioners then count in seconds instead of FLOPs. Ranks measure at the same
time, so that those that share a machine slow one another as they do in a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardmlx.common.environment import Blas
from shardmlx.config.profile import ProfileOptions, read_options
from shardmlx.distributed.run_ranks import run_ranks

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after bad input. A failure at run time ends all ranks."""
    given = sys.argv[1:] if argv is None else argv
    return run_ranks(lambda rank: read_options(given, rank), lambda options: options.timeout, _load)


def _load() -> Callable[[ProfileOptions, Transport, Blas], None]:
    from shardmlx.training.profiling import run

    return run


if __name__ == "__main__":
    raise SystemExit(main())
