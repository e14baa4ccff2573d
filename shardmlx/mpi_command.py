"""What the commands share that run as one process a rank: MPI started last, failures by name."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from shardmlx.environment import Blas, launched_rank, prepare
from shardmlx.errors import UserError, one_line

if TYPE_CHECKING:
    from shardmlx.transport import Transport

T = TypeVar("T")

SECONDS_FOR_RANK_0 = 5.0
"""More than ranks start apart, and than mpirun needs to end the others."""


def run_ranks(
    read_options: Callable[[int], T],
    timeout: Callable[[T], float],
    load: Callable[[], Callable[[T, Transport, Blas], None]],
) -> int:
    """Exit status of ``load()(options, transport, blas)`` on this rank: 0, or 2 after bad input.

    ``read_options`` is given the rank and needs neither MLX nor MPI; ``load`` imports what does.
    A failure at run time ends all ranks.
    """
    rank = launched_rank()
    try:
        options = read_options(rank)
        blas = prepare()
    except UserError as error:
        return _refuse_before_mpi(error, rank)
    run = load()

    # MPI last: it starts when it is imported, and what fails before it ends this process simply.
    from shardmlx.agreement import AgreedError

    from shardmlx import mpi  # isort: skip

    try:
        transport = mpi.MPITransport(timeout(options))
        try:
            run(options, transport, blas)
            status = 0
        except AgreedError as error:
            status = _refuse(error, transport.rank)
        transport.close()
    except BaseException as error:
        # The other ranks know nothing of it and would wait.
        _report_failure(error, rank)
        mpi.abort(2 if isinstance(error, UserError) else 1)
        raise
    return status


def _refuse(error: UserError, rank: int) -> int:
    if rank == 0:
        print(f"shardmlx: error: {one_line(error)}", file=sys.stderr, flush=True)
    return 2


def _refuse_before_mpi(error: UserError, rank: int) -> int:
    """Without MPI a rank cannot know whether rank 0 has met the same fault, and says so.

    It most likely has, and then mpirun ends this process too before the wait is over.
    """
    if rank == 0:
        return _refuse(error, rank)
    time.sleep(SECONDS_FOR_RANK_0)
    return _refuse(UserError(f"{_name(rank)}: {error}"), 0)


def _name(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname().split('.')[0]}"


def _report_failure(error: BaseException, rank: int) -> None:
    """One line, from the rank that failed; the traceback only for those who ask."""
    if os.environ.get("SHARDMLX_TRACEBACK"):
        traceback.print_exception(error)
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)
    if not text.startswith(f"rank {rank}"):
        text = f"{_name(rank)}: {type(error).__name__}: {text}"
    print(f"shardmlx: failed: {text}", file=sys.stderr, flush=True)
