"""``mpirun --hostfile F python -m shardmlx.doctor``: look at the machines and links of a job.

With ``--ssh --hostfile F``, without mpirun, whether the hosts can run a job at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardmlx.common.cli import run_command
from shardmlx.common.environment import Blas, launched_rank
from shardmlx.common.reporter import check_writable
from shardmlx.config.doctor import STDOUT, DoctorConfig, load_config
from shardmlx.distributed.run_ranks import run_ranks
from shardmlx.errors import UserError
from shardmlx.hosts.doctor_report import deliver, progress, visit_content, visit_text
from shardmlx.hosts.doctor_ssh import visit

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 1 for warnings with ``--strict``; 2 after bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    rank = launched_rank()
    try:
        wants_ssh = load_config(given, rank).ssh
    except UserError:
        wants_ssh = False  # run_ranks says it, as every command of ranks does
    if wants_ssh and rank != 0:
        return 0  # under mpirun one asks for all
    if wants_ssh:
        return run_command(lambda: _ask_with_ssh(given))
    return run_ranks(
        lambda rank: load_config(given, rank), lambda config: config.timeout, _load, alike=False
    )


def _ask_with_ssh(given: Sequence[str]) -> int:
    config = load_config(given)
    if config.json not in (None, STDOUT):
        check_writable(Path(str(config.json)), "--json")
    progress(f"asking the hosts of {config.hostfile} with {config.agent or 'ssh'}")
    found = visit(str(config.hostfile), config.agent, config.python)
    deliver(visit_text(found), visit_content(found), config.json)
    return 1 if config.strict and found.findings else 0


def _load() -> Callable[[DoctorConfig, Transport, Blas], None]:
    from shardmlx.hosts.doctor_mpi import run

    return run


if __name__ == "__main__":
    raise SystemExit(main())
