"""Run a command as one process a rank: MPI starts last, and failures are reported."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from shardmlx.common.environment import (
    LAUNCHED,
    TERMINAL,
    Blas,
    keep_awake,
    launched_rank,
    prepare,
    tell_launch,
    tell_launch_of_begin,
    write_to_terminal,
)
from shardmlx.common.hang_up import outlive_readers
from shardmlx.distributed.processes import under_mpirun
from shardmlx.distributed.shutdown import JobShutdown
from shardmlx.distributed.times import (
    SECONDS_FOR_RANK_0,
    SECONDS_FOR_THE_REPORTER,
    SECONDS_TO_AGREE,
)
from shardmlx.errors import AgreedFailure, Stopped, UserError, one_line

if TYPE_CHECKING:
    from shardmlx.distributed.mpi import MPITransport
    from shardmlx.distributed.transport import Transport

T = TypeVar("T")


@contextlib.contextmanager
def connect(timeout: float = 600.0, *, alike: bool = True) -> Iterator[MPITransport]:
    """Join the ranks of ``mpirun`` for the length of a block. All ranks must call it, once.

    A program started without mpirun is a single rank. A wait for another rank fails after
    ``timeout`` seconds, and names what it waited for. If ``alike``, ranks with another shardmlx or
    MLX than rank 0's are refused. Exceptions that all ranks raise together (``AgreedError``,
    ``AgreedFailure``, ``Stopped``) reach the caller when all have left; so does ``sys.exit(0)``,
    with which a rank leaves in order. Any other exception ends the job, since the other ranks would
    wait: this rank reports it, and all processes end, with status 2 after a ``UserError``, the
    given one after ``sys.exit``, otherwise 1.
    """
    prepare()

    # MPI comes last: it starts at its import, and any earlier failure ends this process simply.
    from shardmlx.distributed.agreement import AgreedError
    from shardmlx.distributed.version_check import compare_versions

    from shardmlx.distributed import mpi  # isort: skip

    shutdown = JobShutdown(launched_rank())
    found_by_all: BaseException | None = None
    try:
        transport = mpi.MPITransport(timeout, shutdown)
        try:
            if alike:
                compare_versions(transport)
            yield transport
        except (AgreedError, AgreedFailure, Stopped, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code:
                raise
            found_by_all = error
        transport.close()
    except BaseException as error:
        if not shutdown.report(error):
            time.sleep(SECONDS_FOR_THE_REPORTER)
        mpi.abort(status_of(error), shutdown)
    if found_by_all is not None:
        raise found_by_all


def status_of(error: BaseException) -> int:
    """Return the job's exit status for an error of one rank."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1
    return 2 if isinstance(error, UserError) else 1


def run_ranks(
    read_options: Callable[[int], T],
    timeout: Callable[[T], float],
    load: Callable[[], Callable[[T, Transport, Blas], None]],
    *,
    alike: bool = True,
) -> int:
    """Run ``load()(options, transport, blas)`` on this rank; return the exit status of the process.

    Rank 0 returns the job's status: 0, 2 after bad input, 1 if all ranks agree that they cannot go
    on, or 128 + a signal that all ranks obeyed. The others return 0, since mpirun kills the
    remaining ranks after a bad status. A failure at run time ends all ranks.

    ``read_options`` is given the rank and needs neither MLX nor MPI; ``load`` imports both. Rank
    0's options count on all ranks, whose versions must be the same if ``alike``.
    """
    # Otherwise Python, at its end, searches a million objects for cycles: for a second, or several
    # where ranks share a core, in which the job seems to hang.
    atexit.register(gc.freeze)
    rank = launched_rank()
    shutdown = JobShutdown(rank)
    write_to_terminal()
    if rank == 0:
        tell_launch_of_begin()
    try:
        # Without garbage collections of what is imported: a tenth of a rank's start.
        gc.disable()
        # Before options import NumPy, whose own BLAS would start threads that spin.
        blas = prepare()
        options = read_options(rank)
        if TERMINAL in os.environ or not under_mpirun():  # otherwise mpirun takes the output
            outlive_readers()
        keep_awake()
        run = load()
    except UserError as error:
        if rank == 0:
            return _end_job(2, f"error: {one_line(error)}", shutdown)
        # Without MPI a rank cannot know whether rank 0 has met the same fault. Most likely it has,
        # and then mpirun ends this process too before the wait is over.
        time.sleep(SECONDS_FOR_RANK_0)
        shutdown.say(f"error: {shutdown.name}: {one_line(error)}")
        return 2
    finally:
        gc.freeze()
        gc.enable()
    status, text = _run_together(
        options, timeout, lambda given, transport: run(given, transport, blas), alike=alike
    )
    return _end_job(status, text, shutdown, all_leave=True) if rank == 0 else 0


def _run_together(
    options: T,
    timeout: Callable[[T], float],
    run: Callable[[T, Transport], None],
    *,
    alike: bool,
) -> tuple[int, str]:
    """Join the other ranks, and run with rank 0's options; return the job's status, and why it is
    not 0."""
    from shardmlx.distributed.agreement import AgreedError

    try:
        with connect(timeout(options), alike=alike) as transport:
            options = transport.broadcast(options, what="options")
            transport.set_timeout(timeout(options))
            run(options, transport)
            if sys.stdout is not None:  # a full disk is a failure of the job
                sys.stdout.flush()
    except AgreedError as error:
        return 2, f"error: {one_line(error)}"
    except AgreedFailure as error:
        return 1, f"failed: {one_line(error)}"
    except Stopped as stop:
        return 128 + stop.signal, one_line(stop)
    return 0, ""


def _end_job(status: int, text: str, shutdown: JobShutdown, *, all_leave: bool = False) -> int:
    """Return this process's status, and tell ``launch`` the job's: mpirun's own says little after a
    lost host. Where launch knows it and ``all_leave``, this process's is 0: after another, mpirun
    prints a block of alarm."""
    if status != 0:
        shutdown.say(text)
        ensure_end = JobShutdown.ensure_mpirun_ends
        atexit.unregister(ensure_end)  # one of an earlier job in this process
        atexit.register(ensure_end, shutdown, SECONDS_TO_AGREE)
    tell_launch(status)
    return 0 if all_leave and LAUNCHED in os.environ else status
