"""``mpirun -n N python -m shardmlx.serve``: OpenAI's API, and a chat page, through pipeline
stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardmlx.common.environment import Blas
from shardmlx.config.serve import ServeConfig, load_config
from shardmlx.distributed.run_ranks import run_ranks
from shardmlx.server.packages import check_packages

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on this rank, and return its exit status: 0, or 2 after bad input.

    A failure at run time ends all ranks.
    """
    given = sys.argv[1:] if argv is None else argv

    def read_options(rank: int) -> ServeConfig:
        config = load_config(given, rank)
        if rank == 0:
            check_packages()
        return config

    return run_ranks(read_options, lambda config: config.timeout, _load)


def _load() -> Callable[[ServeConfig, Transport, Blas], None]:
    from shardmlx.server.run import run

    return run


if __name__ == "__main__":
    raise SystemExit(main())
