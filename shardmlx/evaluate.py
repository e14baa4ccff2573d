"""``mpirun -n N python -m shardmlx.evaluate``: measure a model through pipeline stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardmlx.common.environment import Blas
from shardmlx.config.evaluate import EvaluateConfig, load_config
from shardmlx.distributed.run_ranks import run_ranks

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on this rank, and return its exit status: 0, or 2 after bad input.

    A failure at run time ends all ranks.
    """
    given = sys.argv[1:] if argv is None else argv
    return run_ranks(lambda rank: load_config(given, rank), lambda config: config.timeout, _load)


def _load() -> Callable[[EvaluateConfig, Transport, Blas], None]:
    from shardmlx.evaluation.command import run

    return run


if __name__ == "__main__":
    raise SystemExit(main())
