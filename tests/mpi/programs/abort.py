"""Rank 1 gives up, by ``Transport.abort`` or with ``--die`` by a signal; the others wait for it."""

from shardmlx.common.environment import prepare

prepare()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

from shardmlx.distributed.mpi import MPITransport  # noqa: E402

transport = MPITransport(timeout=600.0)
transport.barrier()
if transport.rank == 1:
    print("rank 1 gives up", file=sys.stderr, flush=True)
    if "--die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.abort(7)
transport.receive_object(1, "what never comes")
